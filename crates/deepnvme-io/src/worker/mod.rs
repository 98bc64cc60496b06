//! One thread, one backend, one loop: fill the queue to its depth, reap at least one, go on.
//!
//! Here live the rules that no backend knows: continuing short transfers, retrying what was interrupted, the fall
//! back from direct to buffered, the copies to and from bounce slots. `flight` is one block on its way, `verdict`
//! decides (purely) what a completion means, `settle` acts on it.

use std::sync::Arc;
use std::time::Duration;

use deepnvme_mem::{Pool, Slot};

use crate::backend::Backend;
use crate::claim::Claim;
use crate::error::{Error, Result};
use crate::op::{Completion, Errno, Op, Pieces, Submit};
use crate::queue::{Queue, Seat, SyncTarget, Work};
use crate::split::Via;
use crate::stats::WorkerStats;

mod flight;
mod settle;
mod verdict;

use flight::{Flight, Flights};

/// Resubmissions of one op that made no progress, before its error is believed.
pub const RETRIES_MAX: u32 = 100;
/// Of those, how many go at once; the later ones are spaced by [`RETRY_PAUSE`].
pub const RETRIES_AT_ONCE: u32 = 10;
/// Pause before a late retry.
pub const RETRY_PAUSE: Duration = Duration::from_millis(1);
/// Bytes collected before they are handed to the kernel although more could follow.
const FLUSH_BYTES: u64 = 1 << 20;

/// What a worker is made from.
pub(crate) struct WorkerSetup {
    pub(crate) queue: Arc<Queue>,
    pub(crate) stats: Arc<WorkerStats>,
    pub(crate) worker_index: u32,
    pub(crate) slot_bytes: usize,
    pub(crate) slots: usize,
    pub(crate) lock_pool: bool,
}

/// The loop's state.
pub(crate) struct Worker<'a> {
    setup: &'a WorkerSetup,
    seat: &'a Seat,
    // Dropped before the flights, also when a panic unwinds: it waits for what the kernel still has, so that no
    // memory goes home while something may write to it.
    backend: Box<dyn Backend>,
    flights: Flights,
    /// Made when the first block needs it.
    pool: Option<Pool>,
    /// A claimed block that waits for a slot.
    waiting: Option<(Claim, u64)>,
    unflushed_bytes: u64,
    completions: Vec<Completion>,
}

impl<'a> Worker<'a> {
    pub(crate) fn new(setup: &'a WorkerSetup, backend: Box<dyn Backend>) -> Self {
        let seat = setup.queue.seat(setup.worker_index);
        seat.sit(backend.waker());
        let flights = Flights::new(backend.depth());
        let completions = Vec::with_capacity(backend.depth() as usize);
        Self { setup, seat, backend, flights, pool: None, waiting: None, unflushed_bytes: 0, completions }
    }

    /// Works until the queue is closed and all is done. An error means that the backend itself has broken down;
    /// every request that this worker holds has then been failed with it.
    pub(crate) fn run(mut self) -> Result<()> {
        loop {
            self.seat.run();
            match self.fill().and_then(|()| self.rest_or_reap()) {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(error) => {
                    self.abandon(&error);
                    return Err(error);
                }
            }
        }
    }

    /// Submits as much as fits.
    fn fill(&mut self) -> Result<()> {
        while self.flights.len() < self.backend.depth() {
            let work = match self.waiting.take() {
                Some((claim, index)) => Some(Work::Block(claim, index)),
                None => self.setup.queue.next(),
            };
            match work {
                None => break,
                Some(Work::Prepare(claim)) => prepare(claim),
                Some(Work::Sync(claim, target)) => self.start_sync(claim, &target)?,
                Some(Work::Block(claim, index)) => {
                    if !self.start_block(claim, index)? {
                        break;
                    }
                }
            }
        }
        self.unflushed_bytes = 0;
        Ok(())
    }

    /// Sleeps or reaps. False when there is nothing left to live for.
    fn rest_or_reap(&mut self) -> Result<bool> {
        if self.flights.is_empty() && self.waiting.is_none() {
            if self.setup.queue.is_over() {
                return Ok(false);
            }
            self.seat.park();
            return Ok(true);
        }
        // With a full queue, or no slot, only a completion can make room: nobody needs to wake us.
        let has_room = self.flights.len() < self.backend.depth() && self.waiting.is_none();
        let mut completions = std::mem::take(&mut self.completions);
        let may_block = completions.is_empty() && (!has_room || self.seat.may_reap());
        self.backend.reap(u32::from(may_block), &mut completions)?;
        for completion in completions.drain(..) {
            self.settle(completion)?;
        }
        if self.completions.is_empty() {
            self.completions = completions;
        }
        Ok(true)
    }

    fn start_sync(&mut self, claim: Claim, target: &SyncTarget) -> Result<()> {
        WorkerStats::count(&self.setup.stats.counters.syncs, 1);
        let (file, kind) = (Arc::clone(&target.file), target.kind);
        let token = self.flights.insert(Flight::sync(claim, target.path.clone()));
        self.submit(Op { token, kind, file, offset: 0, pieces: Pieces::new() })
    }

    /// Starts a block; false when it has to wait for a slot.
    fn start_block(&mut self, claim: Claim, index: u64) -> Result<bool> {
        let block = claim.job().plan.block(index);
        let mut slot = None;
        if block.via == Via::Slot {
            slot = match self.take_slot() {
                Ok(Some(slot)) => Some(slot),
                Ok(None) => {
                    self.waiting = Some((claim, index));
                    return Ok(false);
                }
                Err(error) => {
                    let path = claim.job().file(&block).path().to_path_buf();
                    claim.end(Err(error.at_path(path)));
                    return Ok(true);
                }
            };
        }
        let mut flight = Flight::block(claim, block, slot);
        match flight.first_op() {
            Ok(op) => {
                let token = self.flights.insert(flight);
                self.submit(Op { token, ..op })?;
            }
            Err(error) => flight.claim.end(Err(error)),
        }
        Ok(true)
    }

    /// A bounce slot, or `None` while all are in use. The pool is made when first needed: most engines never do.
    fn take_slot(&mut self) -> Result<Option<Slot>> {
        if self.pool.is_none() {
            let WorkerSetup { slot_bytes, slots, lock_pool, .. } = *self.setup;
            let pool = Pool::new(slot_bytes, slots, lock_pool).map_err(|error| {
                let errno = Errno::from_io_error(&error).unwrap_or(Errno::NOMEM);
                Error::os("allocate the bounce pool", errno)
            })?;
            self.backend.register(&pool.arena());
            let held = (pool.lock_state(), pool.bound_bytes() as u64);
            *crate::sync::lock(&self.setup.stats.pool) = Some(held);
            self.pool = Some(pool);
        }
        Ok(self.pool.as_ref().and_then(Pool::try_take))
    }

    fn submit(&mut self, mut op: Op) -> Result<()> {
        WorkerStats::count(&self.setup.stats.counters.ops, 1);
        self.unflushed_bytes += op.bytes() as u64;
        // There is room for every flight, so that a busy backend only has completions to hand out first.
        while let Submit::Busy(back) = self.backend.submit(op) {
            op = back;
            self.backend.reap(1, &mut self.completions)?;
        }
        if self.unflushed_bytes >= FLUSH_BYTES {
            self.unflushed_bytes = 0;
            self.backend.flush()?;
        }
        Ok(())
    }

    /// Fails all that this worker holds, after its backend broke down.
    fn abandon(self, error: &Error) {
        let Self { backend, mut flights, waiting, .. } = self;
        drop(backend);
        let flights = flights.drain().into_iter().map(|flight| flight.claim);
        for claim in flights.chain(waiting.map(|(claim, _)| claim)) {
            claim.end(Err(error.clone()));
        }
    }
}

/// Gives the files of a request their final size.
fn prepare(claim: Claim) {
    let job = claim.job();
    let mut sizes = job.files.iter().zip(&job.file_ends);
    let sized = match job.has_failed() {
        true => Ok(()),
        false => sizes.try_for_each(|(file, bytes)| file.set_len(*bytes)),
    };
    claim.end(sized.map(|()| 0));
}
