//! A backend with a seeded schedule: when ops take effect, and the order of completions.

use std::sync::Arc;
#[cfg(not(simulated))]
use std::{
    sync::{Condvar, Mutex},
    thread,
};

use deepnvme_io::Result;
use deepnvme_io::backend::{Backend, BackendKind, Wake};
use deepnvme_io::op::{Completion, Op, Submit};
use deepnvme_mem::sync::ignore_poison;
#[cfg(simulated)]
use deepnvme_simulation_runtime::{
    sync::{Condvar, Mutex},
    thread,
};

use crate::rng::Rng;

/// The device of a scheduled backend.
pub trait SimDevice {
    /// Belongs to an accepted op until it completes, such as the writes that a sync makes durable.
    type Accepted;
    /// The change by an op that is not completed yet.
    type Change;

    /// Maximum delay of an op in calls of `reap`, unless it is waited for.
    const DELAY_REAPS_MAX: u64;

    /// Accepts an op.
    fn accept(&mut self, op: &Op) -> Self::Accepted;

    /// Executes an op: the file or the memory changes, but the submitter does not know yet.
    ///
    /// # Errors
    /// If the queue itself fails.
    fn execute(&mut self, op: Op, accepted: &Self::Accepted, rng: &mut Rng) -> Result<(Completion, Self::Change)>;

    /// Records that the submitter learns of the completion now.
    fn complete(&mut self, completion: &Completion, accepted: Self::Accepted, change: Self::Change);
}

/// A backend that keeps the contract and otherwise follows its seed.
pub struct ScheduledBackend<D: SimDevice> {
    device: D,
    depth: u32,
    rng: Rng,
    /// Calls of `reap` so far: the only clock.
    now_reaps: u64,
    ops: Vec<InFlightOp<D>>,
    waker: Arc<Waker>,
}

struct InFlightOp<D: SimDevice> {
    due_reaps: u64,
    accepted: D::Accepted,
    stage: Stage<D>,
}

enum Stage<D: SimDevice> {
    Accepted(Op),
    Executed(Completion, D::Change),
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

impl<D: SimDevice> ScheduledBackend<D> {
    /// Creates a queue of this depth.
    ///
    /// # Panics
    /// If the depth is 0.
    #[must_use]
    pub fn new(device: D, depth: u32, rng: Rng) -> Self {
        assert!(depth > 0, "a queue has room for one op at least");
        Self { device, depth, rng, now_reaps: 0, ops: Vec::new(), waker: Arc::default() }
    }

    /// Executes the op at `index`, unless that is done.
    fn execute(&mut self, index: usize) -> Result<()> {
        let InFlightOp { due_reaps, accepted, stage } = self.ops.swap_remove(index);
        let stage = match stage {
            Stage::Accepted(op) => {
                let (completion, change) = self.device.execute(op, &accepted, &mut self.rng)?;
                Stage::Executed(completion, change)
            }
            done @ Stage::Executed(..) => done,
        };
        self.ops.push(InFlightOp { due_reaps, accepted, stage });
        let last = self.ops.len() - 1;
        self.ops.swap(index, last);
        Ok(())
    }

    /// Completes the due ops, in random order.
    fn complete_due(&mut self, completions: &mut Vec<Completion>) -> Result<()> {
        self.rng.shuffle(&mut self.ops);
        let mut index = 0;
        while index < self.ops.len() {
            if self.ops[index].due_reaps > self.now_reaps {
                index += 1;
                continue;
            }
            self.execute(index)?;
            let InFlightOp { accepted, stage, .. } = self.ops.swap_remove(index);
            let Stage::Executed(completion, change) = stage else { unreachable!("it has just been executed") };
            self.device.complete(&completion, accepted, change);
            completions.push(completion);
        }
        Ok(())
    }

    /// Makes the next `count` ops due now.
    fn make_due(&mut self, count: usize) {
        self.ops.sort_by_key(|op| op.due_reaps);
        for op in self.ops.iter_mut().take(count) {
            op.due_reaps = self.now_reaps;
        }
    }
}

impl<D: SimDevice> Backend for ScheduledBackend<D> {
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
        let accepted = self.device.accept(&op);
        let due_reaps = self.now_reaps + self.rng.below(D::DELAY_REAPS_MAX + 1);
        self.ops.push(InFlightOp { due_reaps, accepted, stage: Stage::Accepted(op) });
        Submit::Queued
    }

    fn flush(&mut self) -> Result<()> {
        for index in 0..self.ops.len() {
            if self.rng.chance(300) {
                self.execute(index)?;
            }
        }
        Ok(())
    }

    fn reap(&mut self, min: u32, completions: &mut Vec<Completion>) -> Result<()> {
        thread::yield_now();
        self.flush()?;
        self.now_reaps += 1;
        let before = completions.len();
        self.complete_due(completions)?;
        let missing = (min as usize).saturating_sub(completions.len() - before);
        if missing == 0 || self.waker.take() {
            return Ok(());
        }
        let can_come = missing <= self.ops.len();
        self.make_due(missing);
        self.complete_due(completions)?;
        if !can_come {
            self.waker.wait();
        }
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.waker.clone()
    }
}

impl<D: SimDevice> Drop for ScheduledBackend<D> {
    /// Executes the ops that were not reaped. They never complete.
    fn drop(&mut self) {
        for InFlightOp { accepted, stage, .. } in std::mem::take(&mut self.ops) {
            if let Stage::Accepted(op) = stage {
                // An error drops the op, and there is no caller to report it to.
                let _ = self.device.execute(op, &accepted, &mut self.rng);
            }
        }
    }
}
