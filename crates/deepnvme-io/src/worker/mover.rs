//! Moves blocks: a backend, its flights, and the bounce buffers of blocks that need a copy. It does not wait for work
//! and has no threads: a worker's loop drives it, or the caller of a small transfer.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use deepnvme_mem::{Pool, Slot};

use super::FLUSH_BYTES;
use super::flight::{Flight, Flights, Landed};
use super::window::Window;
use crate::backend::Backend;
use crate::backend::gds::Gds;
use crate::config::DirectMode;
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::{AsyncCopier, EngineGpus, GpuSlice};
use crate::op::{Completion, Direction, Errno, Op, Pieces, Submit};
use crate::request::{SyncTarget, WorkGuard};
use crate::split::{Block, Route};
use crate::stats::WorkerStats;
use crate::trace::Tape;

/// The bounce buffers that a mover may allocate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotSetup {
    pub(crate) slot_bytes: usize,
    pub(crate) slots: usize,
    pub(crate) lock_pool: bool,
    pub(crate) register: bool,
}

impl SlotSetup {
    /// Returns the maximum number of bounced reads in flight: a third of the bounce buffers, while the others are
    /// copied out. Devices often report completions in bursts. If all bounce buffers are in flight, they complete
    /// together, and the device idles until the first is copied. The buffers in use should also fit in the CPU's
    /// caches.
    ///
    /// A GPU's copy engine keeps up with any disk, so reads to a GPU get two thirds.
    fn bounced_reads_max(self, to_gpu: bool) -> usize {
        let third = self.slots.div_ceil(3);
        if to_gpu { (2 * third).min(self.slots) } else { third }
    }
}

/// Whether GPU transfers use cuFile.
#[derive(Clone, Debug)]
pub(crate) struct GdsSetup {
    pub(crate) gds: Arc<Gds>,
    pub(crate) mode: DirectMode,
}

/// Returns the error of a request that requires GPUDirect Storage.
pub(crate) fn gds_required(reason: &str) -> Error {
    let detail = format!("{reason}; GPUDirect Storage is required: use gds=\"preferred\", or mend that");
    Error::new(ErrorKind::Unsupported, "use GPU memory", detail)
}

/// The next step after a copy between a bounce buffer and a GPU.
pub(super) enum Copying {
    /// The bounce buffer of a write is full, so its op can be submitted.
    Out(Flight),
    /// A read is complete.
    TransferMemory(Landed),
}

/// The claims in progress on one backend.
pub(crate) struct Mover<B: Backend> {
    // Dropped before the flights, even when a panic unwinds: it waits for the kernel's ops, so no memory is released
    // while the kernel may write to it.
    pub(super) backend: B,
    // Dropped before the flights for the same reason, for GPUs. Created for the first block that needs it.
    pub(super) copies: Option<AsyncCopier>,
    pub(super) flights: Flights,
    /// By the numbers of their copies.
    pub(super) copying: HashMap<u64, Copying>,
    gpus: Arc<EngineGpus>,
    /// `None` if cuFile is disabled.
    pub(super) gds: Option<GdsSetup>,
    /// Blocks that cuFile has refused, waiting for a bounce buffer.
    pub(super) refused: VecDeque<(WorkGuard, Block)>,
    pub(super) window: Window,
    /// Bounced reads in flight.
    pub(super) bounced_reads: usize,
    /// Completed bounced reads that are still to be copied.
    pub(super) landed: VecDeque<Landed>,
    pub(super) stats: Arc<WorkerStats>,
    pub(super) tape: Tape,
    slot_setup: SlotSetup,
    /// Created for the first block that needs it.
    pool: Option<Pool>,
    /// Whether the pool is registered with the GPU driver.
    is_pool_known: bool,
    unflushed_bytes: u64,
    completions: Vec<Completion>,
}

impl Copying {
    fn flight(&self) -> &Flight {
        match self {
            Self::Out(flight) => flight,
            Self::TransferMemory(landed) => &landed.flight,
        }
    }

    pub(super) fn into_flight(self) -> Flight {
        match self {
            Self::Out(flight) => flight,
            Self::TransferMemory(landed) => landed.flight,
        }
    }
}

impl<B: Backend> Mover<B> {
    pub(super) fn new(
        backend: B,
        window: Window,
        (stats, tape): (Arc<WorkerStats>, Tape),
        slot_setup: SlotSetup,
        gpus: &Arc<EngineGpus>,
    ) -> Self {
        let flights = Flights::new(backend.depth());
        let completions = Vec::with_capacity(backend.depth() as usize);
        let landed = VecDeque::with_capacity(slot_setup.slots);
        Self {
            backend,
            copies: None,
            flights,
            copying: HashMap::new(),
            gpus: Arc::clone(gpus),
            gds: None,
            refused: VecDeque::new(),
            window,
            bounced_reads: 0,
            landed,
            stats,
            tape,
            slot_setup,
            pool: None,
            is_pool_known: false,
            unflushed_bytes: 0,
            completions,
        }
    }

    pub(super) fn with_gds(mut self, setup: GdsSetup) -> Self {
        self.gds = (setup.mode != DirectMode::Disabled).then_some(setup);
        self
    }

    pub(crate) fn has_room(&self) -> bool {
        self.window.has_room(self.flights.len() + self.copying.len() as u32)
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.flights.is_empty() && self.landed.is_empty() && self.copying.is_empty() && self.refused.is_empty()
    }

    /// Returns whether blocks that cuFile has refused wait for a bounce buffer.
    pub(crate) fn has_refused(&self) -> bool {
        !self.refused.is_empty()
    }

    /// Starts the blocks that cuFile has refused, through bounce buffers. Returns false if none is free for them.
    pub(crate) fn start_refused(&mut self) -> Result<bool> {
        while self.has_room()
            && let Some((guard, block)) = self.refused.pop_front()
        {
            if let Some(guard) = self.start(guard, block.clone())? {
                self.refused.push_front((guard, block));
                return Ok(false);
            }
        }
        Ok(self.refused.is_empty())
    }

    /// Queues a block that cuFile does not take for bounce buffers, split as needed.
    pub(super) fn send_through_slots(&mut self, guard: WorkGuard, block: &Block) {
        let slot_bytes = self.slot_setup.slot_bytes as u64;
        let starts = (block.range.start..block.range.end).step_by(self.slot_setup.slot_bytes);
        let guards = guard.split((block.range.end - block.range.start).div_ceil(slot_bytes));
        for (guard, start) in guards.into_iter().zip(starts) {
            let range = start..(start + slot_bytes).min(block.range.end);
            self.refused.push_back((guard, Block { io: range.clone(), range, route: Route::Bounce, ..block.clone() }));
        }
    }

    /// Returns whether copies to or from GPUs are in progress.
    pub(crate) fn is_copying(&self) -> bool {
        !self.copying.is_empty()
    }

    /// Returns whether completed bounced reads are still to be copied.
    pub(crate) fn has_landed(&self) -> bool {
        !self.landed.is_empty()
    }

    /// Returns whether completions are unhandled.
    pub(crate) fn has_news(&self) -> bool {
        !self.completions.is_empty()
    }

    pub(crate) fn start_sync(&mut self, guard: WorkGuard, target: &SyncTarget) -> Result<()> {
        WorkerStats::count(&self.stats.counters.syncs, 1);
        let (file, kind) = (Arc::clone(&target.file), target.kind);
        let token = self.flights.insert(Flight::sync(guard, target.path.clone()));
        self.submit(Op { token, kind, file, offset: 0, pieces: Pieces::new(), cufile: None })
    }

    /// Starts a block. Returns its claim if it must wait for a bounce buffer.
    pub(crate) fn start_block(&mut self, guard: WorkGuard, index: u64) -> Result<Option<WorkGuard>> {
        let block = guard.request().plan.block(index);
        if block.route == Route::CuFile
            && let Err(reason) = self.check_gds(&guard, &block)
        {
            match self.do_without_gds(&reason) {
                Ok(()) => {
                    self.send_through_slots(guard, &block);
                    return Ok(None);
                }
                Err(error) => {
                    let path = guard.request().file(&block).path().to_path_buf();
                    guard.end(Err(error.at_path(path)));
                    return Ok(None);
                }
            }
        }
        self.start(guard, block)
    }

    /// Registers the file of a block with cuFile.
    fn check_gds(&self, guard: &WorkGuard, block: &Block) -> std::result::Result<(), String> {
        let Some(setup) = &self.gds else { return Err("this engine does without cuFile".into()) };
        let file = guard.request().file(block);
        file.part_at(block.io.start).0.check_gds(&setup.gds)
    }

    /// Records why cuFile is unavailable. Fails if cuFile is required.
    pub(super) fn do_without_gds(&self, reason: &str) -> Result<()> {
        if self.gds.as_ref().is_some_and(|setup| setup.mode == DirectMode::Required) {
            return Err(gds_required(reason));
        }
        crate::sync::lock(&self.stats.gds_reason).get_or_insert_with(|| reason.to_owned());
        Ok(())
    }

    /// Starts a block as it is. Returns its claim if it must wait for a bounce buffer.
    fn start(&mut self, guard: WorkGuard, block: Block) -> Result<Option<WorkGuard>> {
        let mut slot = None;
        if block.route == Route::Bounce {
            let is_read = guard.request().plan.direction() == Direction::Read;
            let to_gpu = guard.request().has_gpu_memory();
            if is_read && self.bounced_reads >= self.slot_setup.bounced_reads_max(to_gpu) {
                return Ok(Some(guard));
            }
            slot = match self.take_slot(&guard) {
                Ok(Some(slot)) => Some(slot),
                Ok(None) => return Ok(Some(guard)),
                Err(error) => {
                    let path = guard.request().file(&block).path().to_path_buf();
                    guard.end(Err(error.at_path(path)));
                    return Ok(None);
                }
            };
        }
        let mut flight = Flight::block(guard, block, slot);
        match flight.fill() {
            Ok(slices) if slices.is_empty() => self.launch(flight)?,
            Ok(slices) => self.copy(Copying::Out(flight), slices),
            Err(error) => flight.guard.end(Err(error)),
        }
        Ok(None)
    }

    /// Submits the op of a block.
    pub(super) fn launch(&mut self, mut flight: Flight) -> Result<()> {
        match flight.first_op() {
            Ok(op) => {
                self.bounced_reads += usize::from(flight.is_bounced_read());
                flight.start(self.flights.len() + 1);
                let token = self.flights.insert(flight);
                self.submit(Op { token, ..op })
            }
            Err(error) => {
                flight.guard.end(Err(error));
                Ok(())
            }
        }
    }

    /// Starts to copy the slices of a bounce buffer that belong to GPU memory.
    pub(super) fn copy(&mut self, copying: Copying, slices: Vec<GpuSlice>) {
        let flight = copying.flight();
        let started = match &flight.slot {
            Some(slot) => {
                let copies = self.copies.get_or_insert_with(|| {
                    let tape = self.tape.clone();
                    AsyncCopier::new(self.gpus.registry(), Box::new(move || tape.now()))
                });
                let bytes = slices.iter().map(|slice| slice.len as u64).sum();
                if let (Some(pool), false) = (&self.pool, self.is_pool_known) {
                    self.is_pool_known = true;
                    if let Err(error) = copies.register(slices[0].memory.device(), &pool.arena()) {
                        crate::sync::lock(&self.stats.staged_reason).get_or_insert(error.detail().to_owned());
                    }
                }
                let direction = flight.guard.request().plan.direction();
                copies.start(direction, &slot.region(), slices).inspect(|_| self.stats.gpu_copy(direction, bytes))
            }
            None => Err(Error::new(ErrorKind::Io, "copy", "a block without a slot; report this as a bug")),
        };
        match started {
            Ok(number) => {
                self.copying.insert(number, copying);
            }
            Err(error) => {
                let error = flight.named(error);
                copying.into_flight().guard.end(Err(error));
            }
        }
    }

    /// Takes a bounce buffer, or `None` while all are in use. The pool is created on first use, since most movers never
    /// need it. For a GPU, it is on the nearest NUMA node.
    fn take_slot(&mut self, guard: &WorkGuard) -> Result<Option<Slot>> {
        if self.pool.is_none() {
            let SlotSetup { slot_bytes, slots, lock_pool, register } = self.slot_setup;
            let made = match guard.request().gpu().and_then(|gpu| self.gpus.node(gpu)) {
                Some(node) => Pool::on_node(slot_bytes, slots, lock_pool, node),
                None => Pool::new(slot_bytes, slots, lock_pool),
            };
            let pool = made.map_err(|error| {
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
        // There is room for every flight, so a busy backend only needs its completions reaped first.
        while let Submit::Busy(back) = self.backend.submit(op) {
            op = back;
            self.backend.reap(1, &mut self.completions)?;
        }
        if self.unflushed_bytes >= FLUSH_BYTES {
            self.flush()?;
        }
        Ok(())
    }

    /// Submits the collected ops to the kernel.
    pub(super) fn flush(&mut self) -> Result<()> {
        if std::mem::take(&mut self.unflushed_bytes) > 0 {
            self.backend.flush()?;
        }
        Ok(())
    }

    /// Submits the collected ops to the kernel and handles completions. Waits for one if `may_block`.
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

    /// Fails everything in flight, after the backend failed.
    pub(crate) fn abandon(self, error: &Error) {
        let Self { backend, copies, mut flights, copying, landed, refused, .. } = self;
        refused.into_iter().for_each(|(guard, _)| guard.end(Err(error.clone())));
        drop(backend);
        drop(copies);
        let landed = landed.into_iter().map(|landed| landed.flight);
        let copying = copying.into_values().map(Copying::into_flight);
        for flight in flights.drain().into_iter().chain(landed).chain(copying) {
            flight.guard.end(Err(error.clone()));
        }
    }
}
