//! What may go wrong, how often, and what that means for one op.

use std::os::fd::AsFd;
use std::time::Duration;

use deepnvme_io::op::{Errno, Op, OpKind};
use rustix::fs::OFlags;

use crate::rng::Rng;

/// A direct transfer that is cut short ends on such a boundary, which every device takes.
const DIRECT_CUT_BYTES: usize = 4096;

/// How often what goes wrong. All chances are per mille of the ops; the default is nothing at all.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FaultPlan {
    /// What the faults are a function of.
    pub seed: u64,
    /// Transfers that move fewer bytes than asked, at least one.
    pub short: u32,
    /// Whether direct transfers, too, are reported to end at any byte, as a network or user-space file system may
    /// do. Otherwise they are cut where every device allows it.
    pub short_anywhere: bool,
    /// Ops that fail with EINTR before they do anything.
    pub eintr: u32,
    /// Ops that fail with EAGAIN before they do anything.
    pub eagain: u32,
    /// Transfers that fail with EIO, half of them after they have been done.
    pub eio: u32,
    /// Writes that fail with ENOSPC.
    pub enospc: u32,
    /// Syncs that fail with EIO.
    pub sync_eio: u32,
    /// Completions that are held back for up to `slow_max`.
    pub slow: u32,
    /// The longest that a slow completion is held back.
    pub slow_max: Duration,
    /// Whether completions come home in a random order, some of them a `reap` later.
    pub reorder: bool,
    /// After so many ops of all backends together, every further one fails with EIO: the device is gone.
    pub eio_after_ops: Option<u64>,
    /// Every transfer that touches this byte of a file fails with EIO: a bad sector.
    pub eio_at_byte: Option<u64>,
}

/// What befalls one op.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fate {
    Nothing,
    /// Move only so many bytes, and say so. `carried` is what goes to the inner backend, which a device may need
    /// to be a little more.
    Short {
        reported: usize,
        carried: usize,
    },
    /// Fail without doing anything.
    Fail(Errno),
    /// Do it all, then say that it failed.
    FailAfterwards(Errno),
}

impl FaultPlan {
    pub(super) fn hits_bad_sector(&self, op: &Op) -> bool {
        let transfer = matches!(op.kind, OpKind::Read | OpKind::Write);
        transfer && self.eio_at_byte.is_some_and(|bad| (op.offset..op.offset + op.bytes() as u64).contains(&bad))
    }

    pub(super) fn draw(&self, op: &Op, bytes: usize, rng: &mut Rng) -> Fate {
        if rng.chance(self.eintr) {
            return Fate::Fail(Errno::INTR);
        }
        if rng.chance(self.eagain) {
            return Fate::Fail(Errno::AGAIN);
        }
        if matches!(op.kind, OpKind::SyncData | OpKind::SyncAll) {
            return if rng.chance(self.sync_eio) { Fate::Fail(Errno::IO) } else { Fate::Nothing };
        }
        if rng.chance(self.eio) {
            return if rng.chance(500) { Fate::Fail(Errno::IO) } else { Fate::FailAfterwards(Errno::IO) };
        }
        if op.kind == OpKind::Write && rng.chance(self.enospc) {
            return Fate::Fail(Errno::NOSPC);
        }
        if rng.chance(self.short)
            && let Some(fate) = self.cut(op, bytes, rng)
        {
            return fate;
        }
        Fate::Nothing
    }

    /// Where to cut a transfer short: on a block for a direct file, on a sector or anywhere for a buffered one.
    fn cut(&self, op: &Op, bytes: usize, rng: &mut Rng) -> Option<Fate> {
        let is_direct = rustix::fs::fcntl_getfl(op.file.as_fd()).is_ok_and(|flags| flags.contains(OFlags::DIRECT));
        let unit = match (is_direct && !self.short_anywhere, rng.chance(500)) {
            (true, _) => DIRECT_CUT_BYTES,
            (false, true) if bytes > 512 => 512,
            (false, _) => 1,
        };
        let units = bytes.checked_sub(1)? / unit;
        if units == 0 {
            return None;
        }
        let reported = unit * rng.within(1..units as u64 + 1) as usize;
        let carried = if is_direct { reported.next_multiple_of(DIRECT_CUT_BYTES).min(bytes) } else { reported };
        Some(Fate::Short { reported, carried })
    }
}
