//! What moves blocks: a backend, the flights on it and the slots for those that must be copied. No waiting for work,
//! no threads: a worker's loop has one, and so has whoever makes a small transfer with its own hands.

use std::collections::VecDeque;
use std::sync::Arc;

use deepnvme_mem::{Pool, Slot};

use super::FLUSH_BYTES;
use super::flight::{Flight, Flights, Landed};
use super::window::Window;
use crate::backend::Backend;
use crate::claim::Claim;
use crate::error::{Error, Result};
use crate::op::{Completion, Errno, Op, Pieces, Submit};
use crate::queue::SyncTarget;
use crate::split::{Direction, Via};
use crate::stats::WorkerStats;

/// The bounce memory that a mover may make.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotSetup {
    pub(crate) slot_bytes: usize,
    pub(crate) slots: usize,
    pub(crate) lock_pool: bool,
    pub(crate) register: bool,
}

impl SlotSetup {
    /// A third of the slots are being filled while the others are copied out. Devices often report what they have done
    /// in bursts: with every slot in the air, all come home together, and the device has nothing to do until the
    /// first of them has been copied. And what is in use at once should stay in the processor's caches.
    fn bounced_reads_max(self) -> usize {
        self.slots.div_ceil(3)
    }
}

/// Claims on their way through one backend.
pub(crate) struct Mover<B: Backend> {
    // Dropped before the flights, also when a panic unwinds: it waits for what the kernel still has, so that no
    // memory goes home while something may write to it.
    pub(super) backend: B,
    pub(super) flights: Flights,
    pub(super) window: Window,
    /// Bounced reads in the air.
    pub(super) bounced_reads: usize,
    /// Those that have come home to their slots, and are still to be copied.
    pub(super) landed: VecDeque<Landed>,
    pub(super) stats: Arc<WorkerStats>,
    slot_setup: SlotSetup,
    /// Made when the first block needs it.
    pool: Option<Pool>,
    unflushed_bytes: u64,
    completions: Vec<Completion>,
}

impl<B: Backend> Mover<B> {
    pub(super) fn new(backend: B, window: Window, stats: Arc<WorkerStats>, slot_setup: SlotSetup) -> Self {
        let flights = Flights::new(backend.depth());
        let completions = Vec::with_capacity(backend.depth() as usize);
        let landed = VecDeque::with_capacity(slot_setup.slots);
        Self {
            backend,
            flights,
            window,
            bounced_reads: 0,
            landed,
            stats,
            slot_setup,
            pool: None,
            unflushed_bytes: 0,
            completions,
        }
    }

    pub(crate) fn has_room(&self) -> bool {
        self.window.has_room(self.flights.len())
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.flights.is_empty() && self.landed.is_empty()
    }

    /// Whether completions have come home that nobody has looked at.
    pub(crate) fn has_news(&self) -> bool {
        !self.completions.is_empty()
    }

    pub(crate) fn start_sync(&mut self, claim: Claim, target: &SyncTarget) -> Result<()> {
        WorkerStats::count(&self.stats.counters.syncs, 1);
        let (file, kind) = (Arc::clone(&target.file), target.kind);
        let token = self.flights.insert(Flight::sync(claim, target.path.clone()));
        self.submit(Op { token, kind, file, offset: 0, pieces: Pieces::new() })
    }

    /// Starts a block; hands its claim back when it has to wait for a slot.
    pub(crate) fn start_block(&mut self, claim: Claim, index: u64) -> Result<Option<Claim>> {
        let block = claim.job().plan.block(index);
        let mut slot = None;
        if block.via == Via::Slot {
            let is_read = claim.job().plan.direction() == Direction::Read;
            if is_read && self.bounced_reads >= self.slot_setup.bounced_reads_max() {
                return Ok(Some(claim));
            }
            slot = match self.take_slot() {
                Ok(Some(slot)) => Some(slot),
                Ok(None) => return Ok(Some(claim)),
                Err(error) => {
                    let path = claim.job().file(&block).path().to_path_buf();
                    claim.end(Err(error.at_path(path)));
                    return Ok(None);
                }
            };
        }
        let mut flight = Flight::block(claim, block, slot);
        match flight.first_op() {
            Ok(op) => {
                self.bounced_reads += usize::from(flight.is_bounced_read());
                flight.in_flight = self.flights.len() + 1;
                let token = self.flights.insert(flight);
                self.submit(Op { token, ..op })?;
            }
            Err(error) => flight.claim.end(Err(error)),
        }
        Ok(None)
    }

    /// A bounce slot, or `None` while all are in use. The pool is made when first needed: most movers never do.
    fn take_slot(&mut self) -> Result<Option<Slot>> {
        if self.pool.is_none() {
            let SlotSetup { slot_bytes, slots, lock_pool, register } = self.slot_setup;
            let pool = Pool::new(slot_bytes, slots, lock_pool).map_err(|error| {
                let errno = Errno::from_io_error(&error).unwrap_or(Errno::NOMEM);
                Error::os("allocate the bounce pool", errno)
            })?;
            if register {
                self.backend.register(&pool.arena());
            }
            self.stats.pool_made(pool.lock_state(), pool.bound_bytes() as u64);
            self.pool = Some(pool);
        }
        Ok(self.pool.as_ref().and_then(Pool::try_take))
    }

    pub(super) fn submit(&mut self, mut op: Op) -> Result<()> {
        WorkerStats::count(&self.stats.counters.ops, 1);
        self.unflushed_bytes += op.bytes() as u64;
        // There is room for every flight, so that a busy backend only has completions to hand out first.
        while let Submit::Busy(back) = self.backend.submit(op) {
            op = back;
            self.backend.reap(1, &mut self.completions)?;
        }
        if self.unflushed_bytes >= FLUSH_BYTES {
            self.flush()?;
        }
        Ok(())
    }

    /// Gives the kernel what was collected.
    pub(super) fn flush(&mut self) -> Result<()> {
        if std::mem::take(&mut self.unflushed_bytes) > 0 {
            self.backend.flush()?;
        }
        Ok(())
    }

    /// Gives the kernel what was collected, and settles what has come home; waits for something if `may_block`.
    pub(crate) fn reap(&mut self, may_block: bool) -> Result<()> {
        self.unflushed_bytes = 0;
        let mut completions = std::mem::take(&mut self.completions);
        self.backend.reap(u32::from(may_block && completions.is_empty()), &mut completions)?;
        for completion in completions.drain(..) {
            self.settle(completion)?;
        }
        if self.completions.is_empty() {
            self.completions = completions;
        }
        Ok(())
    }

    /// Fails all that is in the air, after the backend broke down.
    pub(crate) fn abandon(self, error: &Error) {
        let Self { backend, mut flights, landed, .. } = self;
        drop(backend);
        for flight in flights.drain().into_iter().chain(landed.into_iter().map(|landed| landed.flight)) {
            flight.claim.end(Err(error.clone()));
        }
    }
}
