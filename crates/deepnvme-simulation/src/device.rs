//! A backend for the code under test. It decides when each transfer takes effect, how, and in which order ops complete.

use std::os::fd::AsFd;
use std::sync::Arc;

use deepnvme_io::Result;
use deepnvme_io::backend::inline::InlineBackend;
use deepnvme_io::backend::{Backend, BackendKind, Wake};
use deepnvme_io::op::{Completion, Errno, Op, OpKind, Pieces, Submit};
use deepnvme_mem::sync::ignore_poison;
use deepnvme_simulation_runtime::sync::{Condvar, Mutex};
use deepnvme_simulation_runtime::thread;
use deepnvme_testkit::data::first_bytes_of;
use deepnvme_testkit::rng::Rng;

use crate::world::folder::Inode;
use crate::world::journal::ChangeId;
use crate::world::{Promise, World};

/// Maximum calls of `reap` for which an op is delayed, unless a caller waits for it.
const DELAY_REAPS_MAX: u64 = 4;

/// A backend over the files of a world.
pub struct WorldBackend {
    world: World,
    depth: u32,
    rng: Rng,
    /// Calls of `reap` so far: the only clock.
    now_reaps: u64,
    ops: Vec<InFlightOp>,
    waker: Arc<Waker>,
}

struct InFlightOp {
    /// The op's number in the world.
    number: u64,
    due_reaps: u64,
    stage: Stage,
    /// The promise of a sync.
    promise: Option<Promise>,
}

enum Stage {
    Accepted(Op),
    /// The file or the memory has changed, but the submitter does not know yet.
    Applied(Completion, Option<(Inode, ChangeId)>),
}

#[derive(Default)]
struct Waker {
    woken: Mutex<bool>,
    changed: Condvar,
}

impl Wake for Waker {
    fn wake(&self) {
        *ignore_poison(self.woken.lock()) = true;
        self.changed.notify_all();
    }
}

impl Waker {
    fn take(&self) -> bool {
        std::mem::take(&mut *ignore_poison(self.woken.lock()))
    }

    fn wait(&self) {
        let guard = ignore_poison(self.woken.lock());
        let mut guard = ignore_poison(self.changed.wait_while(guard, |woken| !*woken));
        *guard = false;
    }
}

impl WorldBackend {
    /// Create a queue of this depth.
    #[must_use]
    pub fn new(world: &World, depth: u32, rng: Rng) -> Self {
        Self { world: world.clone(), depth, rng, now_reaps: 0, ops: Vec::new(), waker: Arc::default() }
    }

    /// Let the op at `index` change the file or its memory, unless it already has.
    fn apply(&mut self, index: usize) {
        let InFlightOp { number, due_reaps, stage, promise } = self.ops.swap_remove(index);
        let stage = match stage {
            Stage::Accepted(op) => self.execute(op, promise.as_ref()),
            done @ Stage::Applied(..) => done,
        };
        self.ops.push(InFlightOp { number, due_reaps, stage, promise });
        let last = self.ops.len() - 1;
        self.ops.swap(index, last);
    }

    fn execute(&mut self, op: Op, promise: Option<&Promise>) -> Stage {
        let fault = self.rng.pick(&[Errno::IO, Errno::INTR, Errno::AGAIN, Errno::NOSPC]);
        let fault = if op.kind == OpKind::Write || fault != Errno::NOSPC { fault } else { Errno::IO };
        let fails = self.world.fallible("transfer", &(op.kind, op.offset, op.bytes()), fault).map(drop);
        if let Err(errno) = fails {
            return Stage::Applied(Completion { op, result: Err(errno) }, None);
        }
        if let Some(promise) = promise {
            let result = self.world.state().sync(promise).map(|()| 0);
            return Stage::Applied(Completion { op, result }, None);
        }
        if op.kind == OpKind::Write {
            self.world.state().before_change();
        }
        let (op, result) = self.transfer(op);
        let change = match (op.kind, result) {
            (OpKind::Write, Ok(written)) => self.record(&op, written),
            _ => None,
        };
        Stage::Applied(Completion { op, result }, change)
    }

    /// Move all bytes, or only the first ones.
    fn transfer(&mut self, mut op: Op) -> (Op, std::result::Result<usize, Errno>) {
        let bytes = op.bytes();
        // Short direct transfers end between sectors.
        let sectors = bytes / 512;
        if sectors < 2 || !self.rng.chance(80) {
            return execute_inline(op);
        }
        let kept = self.rng.within(1..sectors as u64) as usize * 512;
        let (mut short, mut left) = (Pieces::new(), kept);
        for piece in &op.pieces {
            let len = piece.len().min(left);
            if len > 0 {
                short.push(piece.slice(0..len));
            }
            left -= len;
        }
        let whole = std::mem::replace(&mut op.pieces, short);
        let (mut done, result) = execute_inline(op);
        done.pieces = whole;
        (done, result)
    }

    fn record(&self, op: &Op, written: usize) -> Option<(Inode, ChangeId)> {
        let bytes = first_bytes_of(op, written);
        let mut state = self.world.state();
        let inode = state.tree.inode_of(op.file.as_fd()).ok()?;
        let id = state.wrote(inode, op.offset, bytes, false).ok()?;
        Some((inode, id))
    }

    /// Complete the due ops, in random order.
    fn complete_due(&mut self, completions: &mut Vec<Completion>) {
        self.rng.shuffle(&mut self.ops);
        let mut index = 0;
        while index < self.ops.len() {
            if self.ops[index].due_reaps > self.now_reaps {
                index += 1;
                continue;
            }
            self.apply(index);
            let InFlightOp { number, stage, .. } = self.ops.swap_remove(index);
            self.complete(number);
            if let Stage::Applied(completion, change) = stage {
                if let Some((inode, id)) = change
                    && let Ok(journal) = self.world.state().tree.journal(inode)
                {
                    journal.report(id);
                }
                completions.push(completion);
            }
        }
    }

    fn complete(&self, number: u64) {
        let mut state = self.world.state();
        if !state.in_flight.remove(number) {
            state.violations.push(format!("transfer {number} completed twice"));
        }
    }

    /// Make the next `count` ops due now.
    fn make_due(&mut self, count: usize) {
        self.ops.sort_by_key(|op| op.due_reaps);
        for op in self.ops.iter_mut().take(count) {
            op.due_reaps = self.now_reaps;
        }
    }
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

impl Backend for WorldBackend {
    fn kind(&self) -> BackendKind {
        BackendKind::Simulated
    }

    fn depth(&self) -> u32 {
        self.depth
    }

    fn in_flight(&self) -> u32 {
        self.ops.len() as u32
    }

    fn submit(&mut self, op: Op) -> Submit {
        if self.in_flight() == self.depth {
            return Submit::Busy(op);
        }
        let promise = match op.kind {
            OpKind::SyncData | OpKind::SyncAll => self.world.state().promise(op.file.as_fd()).ok(),
            OpKind::Read | OpKind::Write => None,
        };
        let due_reaps = self.now_reaps + self.rng.below(DELAY_REAPS_MAX + 1);
        let number = self.world.state().in_flight.add();
        self.ops.push(InFlightOp { number, due_reaps, stage: Stage::Accepted(op), promise });
        Submit::Queued
    }

    fn flush(&mut self) -> Result<()> {
        for index in 0..self.ops.len() {
            if self.rng.chance(300) {
                self.apply(index);
            }
        }
        Ok(())
    }

    fn reap(&mut self, min: u32, completions: &mut Vec<Completion>) -> Result<()> {
        thread::yield_now();
        self.flush()?;
        self.now_reaps += 1;
        let before = completions.len();
        self.complete_due(completions);
        let missing = (min as usize).saturating_sub(completions.len() - before);
        if missing == 0 || self.waker.take() {
            return Ok(());
        }
        let can_come = missing <= self.ops.len();
        self.make_due(missing);
        self.complete_due(completions);
        if !can_come {
            self.waker.wait();
        }
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.waker.clone()
    }
}

impl Drop for WorldBackend {
    /// Ops that were not reaped never complete. The world reports them at the end.
    fn drop(&mut self) {
        for index in 0..self.ops.len() {
            self.apply(index);
        }
    }
}
