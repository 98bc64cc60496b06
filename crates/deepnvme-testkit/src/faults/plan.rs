//! Probabilities of faults, and the fault of one op.

use std::os::fd::AsFd;
use std::time::Duration;

use deepnvme_io::op::{Errno, Op, OpKind};
use rustix::fs::OFlags;

use crate::rng::Rng;

/// Short direct transfers end on this boundary, which every device supports.
const DIRECT_CUT_BYTES: usize = deepnvme_mem::PAGE_BYTES as usize;

/// Probabilities of faults, per mille of the ops. The default is no faults.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FaultPlan {
    /// Seed of the faults.
    pub seed: u64,
    /// Transfers that move fewer bytes than requested, at least one.
    pub short: u32,
    /// Whether direct transfers may also end at any byte, as on network and user-space file systems. Otherwise they
    /// end on a boundary that every device supports.
    pub short_anywhere: bool,
    /// Ops that fail with EINTR without effect.
    pub eintr: u32,
    /// Ops that fail with EAGAIN without effect.
    pub eagain: u32,
    /// Transfers that fail with EIO, half of them after taking effect.
    pub eio: u32,
    /// Writes that fail with ENOSPC.
    pub enospc: u32,
    /// Syncs that fail with EIO.
    pub sync_eio: u32,
    /// Completions that are delayed by up to `slow_max`.
    pub slow: u32,
    /// Maximum delay of a completion.
    pub slow_max: Duration,
    /// Whether completions are returned in random order, some of them one `reap` later.
    pub reorder: bool,
    /// After this many ops of all backends, every op fails with EIO: the device is dead.
    pub eio_after_ops: Option<u64>,
    /// Transfers that include this byte of a file fail with EIO: a bad sector.
    pub eio_at_byte: Option<u64>,
}

/// The fault of one op.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum InjectedFault {
    Nothing,
    /// Move and report fewer bytes. `carried` bytes go to the inner backend; a device may require a few more.
    Short {
        reported: usize,
        carried: usize,
    },
    /// Fail without effect.
    Fail(Errno),
    /// Fail after taking effect.
    FailAfterwards(Errno),
}

impl FaultPlan {
    pub(super) fn hits_bad_sector(&self, op: &Op) -> bool {
        let transfer = matches!(op.kind, OpKind::Read | OpKind::Write);
        transfer && self.eio_at_byte.is_some_and(|bad| (op.offset..op.offset + op.bytes() as u64).contains(&bad))
    }

    pub(super) fn draw(&self, op: &Op, bytes: usize, rng: &mut Rng) -> InjectedFault {
        if rng.chance(self.eintr) {
            return InjectedFault::Fail(Errno::INTR);
        }
        if rng.chance(self.eagain) {
            return InjectedFault::Fail(Errno::AGAIN);
        }
        if matches!(op.kind, OpKind::SyncData | OpKind::SyncAll) {
            return if rng.chance(self.sync_eio) { InjectedFault::Fail(Errno::IO) } else { InjectedFault::Nothing };
        }
        if rng.chance(self.eio) {
            return if rng.chance(500) {
                InjectedFault::Fail(Errno::IO)
            } else {
                InjectedFault::FailAfterwards(Errno::IO)
            };
        }
        if op.kind == OpKind::Write && rng.chance(self.enospc) {
            return InjectedFault::Fail(Errno::NOSPC);
        }
        if rng.chance(self.short)
            && let Some(fault) = self.cut(op, bytes, rng)
        {
            return fault;
        }
        InjectedFault::Nothing
    }

    /// Chooses the end of a short transfer: a page boundary for a direct file, unless `short_anywhere` is set; else a
    /// sector or any byte.
    fn cut(&self, op: &Op, bytes: usize, rng: &mut Rng) -> Option<InjectedFault> {
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
        Some(InjectedFault::Short { reported, carried })
    }
}
