//! The seeded schedule: when ops take effect, and the order of completions.

use std::sync::{Arc, Condvar, Mutex};

use deepnvme_io::Result;
use deepnvme_io::backend::{Backend, BackendKind, Wake};
use deepnvme_io::op::{Completion, Op, OpKind, Submit};
use deepnvme_mem::sync::ignore_poison;

use super::SimDisk;
use super::journal::WriteId;
use crate::rng::Rng;

/// Maximum delay of an op in calls of `reap`, unless it is waited for.
const DELAY_REAPS_MAX: u64 = 6;

/// A backend that keeps the contract and otherwise follows its seed.
pub struct SimBackend {
    disk: SimDisk,
    depth: u32,
    carrier: Box<dyn Backend>,
    rng: Rng,
    /// Calls of `reap` so far: the only clock.
    now_reaps: u64,
    in_flight_ops: Vec<InFlight>,
    waker: Arc<SimWake>,
}

struct InFlight {
    due_reaps: u64,
    stage: Stage,
    /// For a sync: the writes that it makes durable.
    promised: Vec<WriteId>,
}

enum Stage {
    Accepted(Op),
    /// The op took effect, but is not completed.
    TookEffect(Completion, Option<WriteId>),
}

#[derive(Default)]
struct SimWake {
    woken: Mutex<bool>,
    changed: Condvar,
}

impl Wake for SimWake {
    fn wake(&self) {
        *ignore_poison(self.woken.lock()) = true;
        self.changed.notify_all();
    }
}

impl SimWake {
    fn take(&self) -> bool {
        std::mem::take(&mut *ignore_poison(self.woken.lock()))
    }

    fn wait(&self) {
        let guard = ignore_poison(self.woken.lock());
        let mut guard = ignore_poison(self.changed.wait_while(guard, |woken| !*woken));
        *guard = false;
    }
}

impl SimBackend {
    pub(super) fn new(disk: SimDisk, depth: u32, carrier: Box<dyn Backend>, rng: Rng) -> Self {
        assert!(depth > 0, "a queue has room for one op at least");
        Self { disk, depth, carrier, rng, now_reaps: 0, in_flight_ops: Vec::new(), waker: Arc::default() }
    }

    /// Applies the op at `index`, if not yet done.
    fn take_effect(&mut self, index: usize) -> Result<()> {
        let flight = self.in_flight_ops.swap_remove(index);
        let InFlight { due_reaps, stage, promised } = flight;
        let stage = match stage {
            Stage::Accepted(op) => self.carry(op, &promised)?,
            done @ Stage::TookEffect(..) => done,
        };
        self.in_flight_ops.push(InFlight { due_reaps, stage, promised });
        let last = self.in_flight_ops.len() - 1;
        self.in_flight_ops.swap(index, last);
        Ok(())
    }

    fn carry(&mut self, op: Op, promised: &[WriteId]) -> Result<Stage> {
        if op.kind != OpKind::Read {
            // The journal needs the contents before the first write.
            self.disk.with_journal(&op, |_| ());
        }
        let Submit::Queued = self.carrier.submit(op) else { panic!("the carrier has one op at a time") };
        let mut completions = Vec::with_capacity(1);
        while completions.is_empty() {
            self.carrier.reap(1, &mut completions)?;
        }
        let completion = completions.swap_remove(0);
        let id = match (completion.op.kind, completion.result) {
            (OpKind::Write, Ok(written)) => {
                self.disk.with_journal(&completion.op, |journal| journal.record(&completion.op, written))
            }
            (OpKind::SyncData | OpKind::SyncAll, Ok(_)) => {
                self.disk.with_journal(&completion.op, |journal| {
                    journal.sync(promised, &*completion.op.file);
                });
                None
            }
            _ => None,
        };
        Ok(Stage::TookEffect(completion, id))
    }

    /// Returns the due ops in random order.
    fn deliver_due(&mut self, completions: &mut Vec<Completion>) -> Result<()> {
        self.rng.shuffle(&mut self.in_flight_ops);
        let mut index = 0;
        while index < self.in_flight_ops.len() {
            if self.in_flight_ops[index].due_reaps > self.now_reaps {
                index += 1;
                continue;
            }
            self.take_effect(index)?;
            let Stage::TookEffect(completion, id) = self.in_flight_ops.swap_remove(index).stage else {
                unreachable!("it has just taken effect")
            };
            if let Some(id) = id {
                self.disk.with_journal(&completion.op, |journal| journal.report(id));
            }
            completions.push(completion);
        }
        Ok(())
    }

    /// Makes the next `count` ops due now.
    fn hurry(&mut self, count: usize) {
        self.in_flight_ops.sort_by_key(|flight| flight.due_reaps);
        for flight in self.in_flight_ops.iter_mut().take(count) {
            flight.due_reaps = self.now_reaps;
        }
    }
}

impl Backend for SimBackend {
    fn kind(&self) -> BackendKind {
        BackendKind::Simulated
    }

    fn depth(&self) -> u32 {
        self.depth
    }

    fn in_flight(&self) -> u32 {
        self.in_flight_ops.len() as u32
    }

    fn submit(&mut self, op: Op) -> Submit {
        if self.in_flight() == self.depth {
            return Submit::Busy(op);
        }
        let promised = match op.kind {
            OpKind::SyncData | OpKind::SyncAll => {
                self.disk.with_journal(&op, |journal| journal.promised()).unwrap_or_default()
            }
            OpKind::Read | OpKind::Write => Vec::new(),
        };
        let due_reaps = self.now_reaps + self.rng.below(DELAY_REAPS_MAX + 1);
        self.in_flight_ops.push(InFlight { due_reaps, stage: Stage::Accepted(op), promised });
        Submit::Queued
    }

    fn flush(&mut self) -> Result<()> {
        for index in 0..self.in_flight_ops.len() {
            if self.rng.chance(300) {
                self.take_effect(index)?;
            }
        }
        Ok(())
    }

    fn reap(&mut self, min: u32, completions: &mut Vec<Completion>) -> Result<()> {
        self.flush()?;
        self.now_reaps += 1;
        let before = completions.len();
        self.deliver_due(completions)?;
        let missing = (min as usize).saturating_sub(completions.len() - before);
        if missing == 0 || self.waker.take() {
            return Ok(());
        }
        let can_come = missing <= self.in_flight_ops.len();
        self.hurry(missing);
        self.deliver_due(completions)?;
        if !can_come {
            self.waker.wait();
        }
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.waker.clone()
    }
}

impl Drop for SimBackend {
    fn drop(&mut self) {
        while let Some(InFlight { stage, promised, .. }) = self.in_flight_ops.pop() {
            if let Stage::Accepted(op) = stage {
                // A carrier that fails here dropped the op, and there is no caller to report to.
                let _ = self.carry(op, &promised);
            }
        }
    }
}
