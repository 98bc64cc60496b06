//! The seeded schedule: when ops take effect, and in which order they come home.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use deepnvme_io::Result;
use deepnvme_io::backend::{Backend, BackendKind, Wake};
use deepnvme_io::op::{Completion, Op, OpKind, Submit};

use super::SimDisk;
use super::journal::WriteId;
use crate::rng::Rng;

/// The most calls of `reap` that an op is held back for, unless somebody waits for it.
const DELAY_REAPS_MAX: u64 = 6;

/// A backend that keeps the contract and otherwise does what its seed says.
pub struct SimBackend {
    disk: SimDisk,
    depth: u32,
    carrier: Box<dyn Backend>,
    rng: Rng,
    /// Calls of `reap` so far: the only clock.
    now_reaps: u64,
    flights: Vec<Flight>,
    waker: Arc<SimWake>,
}

struct Flight {
    due_reaps: u64,
    stage: Stage,
    /// For a sync: the writes that it promises.
    promised: Vec<WriteId>,
}

enum Stage {
    Accepted(Op),
    /// The file has changed, or the memory has, but the submitter does not know.
    TookEffect(Completion, Option<WriteId>),
}

#[derive(Default)]
struct SimWake {
    woken: Mutex<bool>,
    changed: Condvar,
}

impl Wake for SimWake {
    fn wake(&self) {
        *self.woken.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }
}

impl SimWake {
    fn take(&self) -> bool {
        std::mem::take(&mut *self.woken.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn wait(&self) {
        let guard = self.woken.lock().unwrap_or_else(PoisonError::into_inner);
        let mut guard = self.changed.wait_while(guard, |woken| !*woken).unwrap_or_else(PoisonError::into_inner);
        *guard = false;
    }
}

impl SimBackend {
    pub(super) fn new(disk: SimDisk, depth: u32, carrier: Box<dyn Backend>, rng: Rng) -> Self {
        assert!(depth > 0, "a queue has room for one op at least");
        Self { disk, depth, carrier, rng, now_reaps: 0, flights: Vec::new(), waker: Arc::default() }
    }

    /// Lets the op at `index` change the file or its memory, if it has not yet.
    fn take_effect(&mut self, index: usize) -> Result<()> {
        let flight = self.flights.swap_remove(index);
        let Flight { due_reaps, stage, promised } = flight;
        let stage = match stage {
            Stage::Accepted(op) => self.carry(op, &promised)?,
            done @ Stage::TookEffect(..) => done,
        };
        self.flights.push(Flight { due_reaps, stage, promised });
        let last = self.flights.len() - 1;
        self.flights.swap(index, last);
        Ok(())
    }

    fn carry(&mut self, op: Op, promised: &[WriteId]) -> Result<Stage> {
        if op.kind != OpKind::Read {
            // The journal must know the file as it was before its first write.
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

    /// Hands out the ops that are due, in a random order.
    fn deliver_due(&mut self, completions: &mut Vec<Completion>) -> Result<()> {
        self.rng.shuffle(&mut self.flights);
        let mut index = 0;
        while index < self.flights.len() {
            if self.flights[index].due_reaps > self.now_reaps {
                index += 1;
                continue;
            }
            self.take_effect(index)?;
            let Stage::TookEffect(completion, id) = self.flights.swap_remove(index).stage else {
                unreachable!("it has just taken effect")
            };
            if let Some(id) = id {
                self.disk.with_journal(&completion.op, |journal| journal.report(id));
            }
            completions.push(completion);
        }
        Ok(())
    }

    /// Makes the `count` ops that are due next due now.
    fn hurry(&mut self, count: usize) {
        self.flights.sort_by_key(|flight| flight.due_reaps);
        for flight in self.flights.iter_mut().take(count) {
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
        self.flights.len() as u32
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
        self.flights.push(Flight { due_reaps, stage: Stage::Accepted(op), promised });
        Submit::Queued
    }

    fn flush(&mut self) -> Result<()> {
        for index in 0..self.flights.len() {
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
        let can_come = missing <= self.flights.len();
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
        while let Some(Flight { stage, promised, .. }) = self.flights.pop() {
            if let Stage::Accepted(op) = stage {
                // A carrier that fails here has dropped the op, and there is nobody left to tell.
                let _ = self.carry(op, &promised);
            }
        }
    }
}
