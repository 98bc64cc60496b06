//! One thread, one backend, one loop: fill the queue to its depth, reap at least one, go on.
//!
//! Here live the rules that no backend knows: continuing short transfers, retrying what was interrupted, the fall
//! back from direct to buffered, the copies to and from bounce slots. `flight` is one block on its way, `verdict`
//! decides (purely) what a completion means.

use std::sync::Arc;
use std::time::Duration;

use deepnvme_mem::{Pool, Slot};

use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::job::Job;
use crate::op::{Completion, Errno, Op, Pieces, Submit, Token};
use crate::queue::{Queue, Seat, SyncTarget, Work};
use crate::split::Via;
use crate::stats::WorkerStats;

mod flight;
mod verdict;

use flight::{Flight, Flights, Task};
use verdict::Verdict;

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
    backend: Box<dyn Backend>,
    flights: Flights,
    /// Made when the first block needs it.
    pool: Option<Pool>,
    /// A claimed block that waits for a slot.
    waiting: Option<(Arc<Job>, u64)>,
    unflushed_bytes: u64,
    completions: Vec<Completion>,
}

impl<'a> Worker<'a> {
    pub(crate) fn new(setup: &'a WorkerSetup, backend: Box<dyn Backend>) -> Self {
        let seat = setup.queue.seat(setup.worker_index);
        seat.sit(backend.waker());
        let flights = Flights::new(backend.depth());
        let completions = Vec::with_capacity(backend.depth() as usize);
        Self {
            setup,
            seat,
            backend,
            flights,
            pool: None,
            waiting: None,
            unflushed_bytes: 0,
            completions,
        }
    }

    /// Works until the queue is closed and all is done. An error means that the backend itself has broken down;
    /// every request that this worker holds has then been failed with it.
    pub(crate) fn run(mut self) -> Result<()> {
        loop {
            self.seat.run();
            let step = self.fill().and_then(|()| self.rest_or_reap());
            match step {
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
                Some((job, index)) => Some(Work::Block(job, index)),
                None => self.setup.queue.next(),
            };
            match work {
                None => break,
                Some(Work::Prepare(job)) => self.prepare(&job),
                Some(Work::Sync(job, target)) => self.start_sync(job, &target)?,
                Some(Work::Block(job, index)) => {
                    if !self.start_block(job, index)? {
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

    fn prepare(&mut self, job: &Arc<Job>) {
        if !job.has_failed() {
            for file in &job.files {
                if let Err(error) = file.set_len(
                    job.plan
                        .segments()
                        .last()
                        .map_or(0, |last| last.offset + last.len),
                ) {
                    // Nothing is claimed yet, so that this takes back every block; an empty job ends below.
                    if self.setup.queue.cancel(job, error.clone()) {
                        return;
                    }
                    job.fail(error);
                }
            }
        }
        self.setup.queue.prepared(job);
    }

    fn start_sync(&mut self, job: Arc<Job>, target: &SyncTarget) -> Result<()> {
        WorkerStats::count(&self.setup.stats.counters.syncs, 1);
        let (file, kind) = (Arc::clone(&target.file), target.kind);
        let token = self.flights.insert(Flight::sync(job, target.path.clone()));
        self.submit(Op {
            token,
            kind,
            file,
            offset: 0,
            pieces: Pieces::new(),
        })
    }

    /// Starts a block; false when it has to wait for a slot.
    fn start_block(&mut self, job: Arc<Job>, index: u64) -> Result<bool> {
        let block = job.plan.block(index);
        let mut slot = None;
        if block.via == Via::Slot {
            slot = match self.take_slot() {
                Ok(Some(slot)) => Some(slot),
                Ok(None) => {
                    self.waiting = Some((job, index));
                    return Ok(false);
                }
                Err(error) => {
                    self.end_block(&job, 0, Some(error.at_path(job.file(&block).path())));
                    return Ok(true);
                }
            };
        }
        let mut flight = Flight::block(Arc::clone(&job), block, slot);
        match flight.first_op() {
            Ok(op) => {
                let token = self.flights.insert(flight);
                self.submit(Op { token, ..op })?;
            }
            Err(error) => {
                drop(flight);
                self.end_block(&job, 0, Some(error));
            }
        }
        Ok(true)
    }

    /// A bounce slot, or `None` while all are in use. The pool is made when first needed: most engines never do.
    fn take_slot(&mut self) -> Result<Option<Slot>> {
        if self.pool.is_none() {
            let pool = Pool::new(
                self.setup.slot_bytes,
                self.setup.slots,
                self.setup.lock_pool,
            );
            let pool = pool.map_err(|error| {
                let errno =
                    rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::NOMEM);
                Error::os("allocate the bounce pool", errno)
            })?;
            self.backend.register(&pool.arena());
            *crate::sync::lock(&self.setup.stats.pool) =
                Some((pool.lock_state(), pool.bound_bytes() as u64));
            self.pool = Some(pool);
        }
        Ok(self.pool.as_ref().and_then(Pool::try_take))
    }

    fn submit(&mut self, op: Op) -> Result<()> {
        WorkerStats::count(&self.setup.stats.counters.ops, 1);
        self.unflushed_bytes += op.bytes() as u64;
        let mut op = op;
        // There is room for every flight, so that a busy backend only has completions to hand out first.
        while let Submit::Busy(back) = self.backend.submit(op) {
            op = back;
            let mut completions = Vec::new();
            self.backend.reap(1, &mut completions)?;
            self.completions.append(&mut completions);
        }
        if self.unflushed_bytes >= FLUSH_BYTES {
            self.unflushed_bytes = 0;
            self.backend.flush()?;
        }
        Ok(())
    }

    /// Acts on one completion.
    fn settle(&mut self, completion: Completion) -> Result<()> {
        let Completion { op, result } = completion;
        let token = op.token;
        match self.flights.get_mut(token).map(|flight| &flight.task) {
            None => Ok(()),
            Some(Task::Block { .. }) => self.settle_block(op, result),
            Some(Task::Sync { .. }) => self.settle_sync(op, result),
        }
    }

    fn settle_sync(&mut self, op: Op, result: Result<usize, Errno>) -> Result<()> {
        let token = op.token;
        let Some(flight) = self.flights.get_mut(token) else {
            return Ok(());
        };
        let error = match result {
            Ok(_) => None,
            Err(errno) if flight.may_retry(errno) => {
                WorkerStats::count(&self.setup.stats.counters.retries, 1);
                return self.submit(op);
            }
            Err(errno) => Some(Error::os("sync", errno)),
        };
        drop(op);
        let Some(flight) = self.flights.remove(token) else {
            return Ok(());
        };
        let error = match flight.task {
            Task::Sync { path } => error.map(|error| error.at_path(path)),
            Task::Block { .. } => error,
        };
        self.setup.queue.sync_done(&flight.job, error);
        Ok(())
    }

    fn settle_block(&mut self, op: Op, result: Result<usize, Errno>) -> Result<()> {
        let counters = &self.setup.stats.counters;
        let token = op.token;
        let Some(flight) = self.flights.get_mut(token) else {
            return Ok(());
        };
        match flight.judge(&op, result) {
            Verdict::Done => {
                drop(op);
                self.land(token, None);
                Ok(())
            }
            Verdict::Continue { bytes } => {
                WorkerStats::count(&counters.short_transfers, 1);
                let mut op = op;
                op.advance(bytes);
                self.submit(op)
            }
            Verdict::Retry => {
                WorkerStats::count(&counters.retries, 1);
                self.submit(op)
            }
            Verdict::GoBuffered(reason) => match flight.go_buffered(op, &reason) {
                Ok(op) => {
                    crate::sync::lock(&self.setup.stats.buffered_reason).get_or_insert(reason);
                    self.submit(op)
                }
                Err(error) => {
                    self.land(token, Some(error));
                    Ok(())
                }
            },
            Verdict::EndOfFile => {
                let error = flight.end_of_file();
                drop(op);
                self.land(token, Some(error));
                Ok(())
            }
            Verdict::Fail(error) => {
                drop(op);
                self.land(token, Some(error));
                Ok(())
            }
        }
    }

    /// Ends a flight whose op has come home: copies what was read, gives the slot back, tells the job.
    fn land(&mut self, token: Token, error: Option<Error>) {
        let Some(mut flight) = self.flights.remove(token) else {
            return;
        };
        let error = error.or_else(|| flight.copy_home().err());
        let Flight {
            job,
            task,
            started,
            slot,
            ..
        } = flight;
        drop(slot);
        let Task::Block { block, channel, .. } = task else {
            return;
        };
        let bytes = if error.is_none() {
            wanted_bytes(&job, &block)
        } else {
            0
        };
        if error.is_none() {
            let (direction, took) = (job.plan.direction(), started.elapsed());
            self.setup
                .stats
                .block_done(direction, channel, block.via, bytes, took);
        }
        self.end_block(&job, bytes, error);
    }

    fn end_block(&mut self, job: &Arc<Job>, bytes: u64, error: Option<Error>) {
        if let Some(error) = error {
            job.fail(error);
        }
        if job.finish_block(bytes) {
            self.setup.queue.blocks_done(job);
        }
    }

    /// Fails all that this worker holds, after its backend broke down: first the backend, which waits for what the
    /// kernel still has, so that no memory goes home while something may write to it.
    fn abandon(self, error: &Error) {
        let Self {
            setup,
            backend,
            mut flights,
            waiting,
            ..
        } = self;
        drop(backend);
        let flights = flights
            .drain()
            .into_iter()
            .map(|flight| (flight.job, matches!(flight.task, Task::Sync { .. })));
        let waiting = waiting.into_iter().map(|(job, _)| (job, false));
        for (job, is_sync) in flights.chain(waiting) {
            if is_sync {
                setup.queue.sync_done(&job, Some(error.clone()));
                continue;
            }
            job.fail(error.clone());
            if job.finish_block(0) {
                setup.queue.blocks_done(&job);
            }
        }
    }
}

/// Bytes of the block that belong to the caller; holes that were read along do not count.
fn wanted_bytes(job: &Job, block: &crate::split::Block) -> u64 {
    job.plan.segments()[block.segments.clone()]
        .iter()
        .map(|segment| {
            (segment.offset + segment.len).min(block.range.end)
                - segment.offset.max(block.range.start)
        })
        .sum()
}
