//! The device of a backend for the code under test, over the simulated file system. It decides the outcome of each
//! transfer, and records it in the world.

use std::os::fd::AsFd;

use deepnvme_io::Result;
use deepnvme_io::backend::Backend;
use deepnvme_io::backend::inline::InlineBackend;
use deepnvme_io::op::{Completion, Errno, Iovecs, Op, OpKind, Submit};
use deepnvme_testkit::data::first_bytes_of;
use deepnvme_testkit::rng::Rng;
use deepnvme_testkit::scheduled_backend::SimDevice;

use crate::world::folder::Inode;
use crate::world::journal::ChangeId;
use crate::world::{Promise, World};

/// The files of a world.
pub struct WorldDevice(pub World);

/// An op that the world has accepted.
pub struct Accepted {
    /// The op's number in the world.
    number: u64,
    /// The promise of a sync.
    promise: Option<Promise>,
}

impl SimDevice for WorldDevice {
    type Accepted = Accepted;
    type Change = Option<(Inode, ChangeId)>;

    const DELAY_REAPS_MAX: u64 = 4;

    fn accept(&mut self, op: &Op) -> Accepted {
        let promise = match op.kind {
            OpKind::SyncData | OpKind::SyncAll => self.0.state().promise(op.file.as_fd()).ok(),
            OpKind::Read | OpKind::Write => None,
        };
        Accepted { number: self.0.state().in_flight.add(), promise }
    }

    fn execute(&mut self, op: Op, accepted: &Accepted, rng: &mut Rng) -> Result<(Completion, Self::Change)> {
        let fault = rng.pick(&[Errno::IO, Errno::INTR, Errno::AGAIN, Errno::NOSPC]);
        let fault = if op.kind == OpKind::Write || fault != Errno::NOSPC { fault } else { Errno::IO };
        let fails = self.0.fallible("transfer", &(op.kind, op.offset, op.bytes()), fault).map(drop);
        if let Err(errno) = fails {
            return Ok((Completion { op, result: Err(errno) }, None));
        }
        if let Some(promise) = &accepted.promise {
            let result = self.0.state().sync(promise).map(|()| 0);
            return Ok((Completion { op, result }, None));
        }
        if op.kind == OpKind::Write {
            self.0.state().before_change();
        }
        let (op, result) = transfer(op, rng);
        let change = match (op.kind, result) {
            (OpKind::Write, Ok(written)) => self.record(&op, written),
            _ => None,
        };
        Ok((Completion { op, result }, change))
    }

    /// Completes an op. The world reports those that never complete, at its end.
    fn complete(&mut self, _: &Completion, accepted: Accepted, change: Self::Change) {
        {
            let mut state = self.0.state();
            if !state.in_flight.remove(accepted.number) {
                state.violations.push(format!("transfer {} completed twice", accepted.number));
            }
        }
        if let Some((inode, id)) = change
            && let Ok(journal) = self.0.state().tree.journal(inode)
        {
            journal.report(id);
        }
    }
}

impl WorldDevice {
    fn record(&self, op: &Op, written: usize) -> Option<(Inode, ChangeId)> {
        let bytes = first_bytes_of(op, written);
        let mut state = self.0.state();
        let inode = state.tree.inode_of(op.file.as_fd()).ok()?;
        let id = state.wrote(inode, op.offset, bytes, false).ok()?;
        Some((inode, id))
    }
}

/// Moves all bytes, or only the first ones.
fn transfer(mut op: Op, rng: &mut Rng) -> (Op, std::result::Result<usize, Errno>) {
    let bytes = op.bytes();
    // Short direct transfers end between sectors.
    let sectors = bytes / 512;
    if sectors < 2 || !rng.chance(80) {
        return execute_inline(op);
    }
    let kept = rng.within(1..sectors as u64) as usize * 512;
    let (mut short, mut left) = (Iovecs::new(), kept);
    for iovec in &op.iovecs {
        let len = iovec.len().min(left);
        if len > 0 {
            short.push(iovec.slice(0..len));
        }
        left -= len;
    }
    let whole = std::mem::replace(&mut op.iovecs, short);
    let (mut done, result) = execute_inline(op);
    done.iovecs = whole;
    (done, result)
}

fn execute_inline(op: Op) -> (Op, std::result::Result<usize, Errno>) {
    let mut backend = InlineBackend::default();
    let mut completions = Vec::with_capacity(1);
    let Submit::Queued = backend.submit(op) else { unreachable!("a new inline backend accepts an op") };
    let reaped = backend.reap(1, &mut completions);
    match (reaped, completions.pop()) {
        (Ok(()), Some(Completion { op, result })) => (op, result),
        _ => unreachable!("an inline backend completes each op that it accepts"),
    }
}
