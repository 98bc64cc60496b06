//! Drives one backend: the ops in flight, the bounce buffers of blocks that need a copy, and the copies to GPUs.
//!
//! It does not wait for work and has no thread: a worker drives it, or the caller of a small request. `completion`
//! handles the completions.

mod completion;

use std::sync::Arc;

use super::accounts::Accounts;
use super::bounce::{BouncePool, BounceSetup};
use super::gds::{GdsRoute, GdsSetup};
use super::gpu_stage::{CopyingBlock, GpuStage};
use super::in_flight::{InFlightOp, InFlightTable};
use super::window::Window;
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::gpu::{EngineGpus, GpuSlice};
use crate::op::{Completion, Direction, Iovecs, Op, Submit};
use crate::request::{SyncTarget, WorkGuard};
use crate::split::{Block, IoMode, Route};
use crate::stats::WorkerStats;

/// Collected bytes that trigger a flush to the kernel although more ops could follow. The number is small because the
/// disk does not know of collected ops. With 64 KiB, the latency of 4 KiB blocks equals that of submitting each one
/// immediately.
const FLUSH_BYTES: u64 = 64 << 10;

/// The work in progress on one backend.
pub(crate) struct IoLoop<B: Backend> {
    // Dropped before the ops in flight, even when a panic unwinds: it waits for the kernel, so no memory is released
    // while the kernel may write to it.
    backend: B,
    // Dropped before the ops in flight for the same reason, for GPUs.
    gpu: GpuStage,
    in_flight: InFlightTable,
    bounce: BouncePool,
    gds: GdsRoute,
    window: Window,
    accounts: Accounts,
    unflushed_bytes: u64,
    completions: Vec<Completion>,
}

impl<B: Backend> IoLoop<B> {
    pub(super) fn new(
        backend: B,
        window: Window,
        accounts: Accounts,
        bounce: BounceSetup,
        gpus: &Arc<EngineGpus>,
    ) -> Self {
        Self {
            in_flight: InFlightTable::new(backend.depth()),
            completions: Vec::with_capacity(backend.depth() as usize),
            backend,
            gpu: GpuStage::new(gpus),
            bounce: BouncePool::new(bounce),
            gds: GdsRoute::default(),
            window,
            accounts,
            unflushed_bytes: 0,
        }
    }

    pub(super) fn with_gds(mut self, setup: GdsSetup) -> Self {
        self.gds = GdsRoute::new(setup);
        self
    }

    pub(crate) fn has_room(&self) -> bool {
        self.window.has_room(self.in_flight.len() + self.gpu.len() as u32)
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && !self.has_completed_reads() && self.gpu.is_empty() && !self.has_refused()
    }

    /// Returns whether blocks that cuFile has refused wait for a bounce buffer.
    pub(crate) fn has_refused(&self) -> bool {
        !self.gds.refused.is_empty()
    }

    /// Starts the blocks that cuFile has refused, through bounce buffers. Returns whether all have started.
    pub(crate) fn start_refused(&mut self) -> Result<bool> {
        while self.has_room()
            && let Some((guard, block)) = self.gds.refused.pop_front()
        {
            if let Some(guard) = self.start(guard, block.clone())? {
                self.gds.refused.push_front((guard, block));
                return Ok(false);
            }
        }
        Ok(self.gds.refused.is_empty())
    }

    /// Sleeps until a copy to or from a GPU is complete, at most a second.
    pub(crate) fn wait_for_gpu_copy(&self) {
        self.gpu.wait_for_one();
    }

    /// Returns whether copies to or from GPUs are in progress.
    pub(crate) fn has_gpu_copies(&self) -> bool {
        !self.gpu.is_empty()
    }

    /// Returns whether completed bounced reads are still to be copied.
    pub(crate) fn has_completed_reads(&self) -> bool {
        !self.bounce.completed_reads.is_empty()
    }

    /// Returns whether completions are unhandled.
    pub(crate) fn has_completions(&self) -> bool {
        !self.completions.is_empty()
    }

    pub(crate) fn start_sync(&mut self, guard: WorkGuard, target: &SyncTarget) -> Result<()> {
        WorkerStats::count(&self.accounts.stats.counters.syncs, 1);
        let (file, kind) = (Arc::clone(&target.file), target.kind);
        let token = self.in_flight.insert(InFlightOp::sync(guard, target.path.clone()));
        self.submit(Op { token, kind, file, offset: 0, iovecs: Iovecs::new(), cufile: None })
    }

    /// Starts a block. Returns its guard if it must wait for a bounce buffer.
    pub(crate) fn start_block(&mut self, guard: WorkGuard, index: u64) -> Result<Option<WorkGuard>> {
        let block = guard.request().plan.block(index);
        if block.route == Route::Gds
            && let Err(reason) = self.gds.prepare(&guard, &block)
        {
            match self.gds.fall_back(&reason, &self.accounts.stats) {
                Ok(()) => {
                    self.gds.queue_for_bounce(guard, &block, self.bounce.buffer_bytes());
                    return Ok(None);
                }
                Err(error) => {
                    let path = guard.request().file(&block).path().to_path_buf();
                    guard.end(Err(error.at_path(path)));
                    return Ok(None);
                }
            }
        }
        let block = self.choose_cache(&guard, block);
        self.start(guard, block)
    }

    /// Turns a direct read into a buffered one if the page cache has the bytes.
    fn choose_cache(&self, guard: &WorkGuard, block: Block) -> Block {
        let request = guard.request();
        let is_direct_read = block.mode == IoMode::Direct && request.plan.direction() == Direction::Read;
        if !is_direct_read || block.route == Route::Gds || !request.is_cached(&block) {
            return block;
        }
        self.accounts.stats.read_from_cache();
        request.plan.through_cache(block)
    }

    /// Starts a block as it is. Returns its guard if it must wait for a bounce buffer.
    fn start(&mut self, guard: WorkGuard, block: Block) -> Result<Option<WorkGuard>> {
        let mut buffer = None;
        if block.route == Route::Bounce {
            let request = guard.request();
            let is_read = request.plan.direction() == Direction::Read;
            if is_read && !self.bounce.may_start_read(request.has_gpu_memory()) {
                return Ok(Some(guard));
            }
            // For a GPU, the buffers are on the nearest NUMA node.
            let node = || request.gpu().and_then(|gpu| self.gpu.node(gpu));
            let taken = self.bounce.take(block.io.end - block.io.start, node, |pool, register| {
                if register {
                    self.backend.register(&pool.arena());
                }
                self.accounts.stats.pool_created(pool.lock_state(), pool.bound_bytes() as u64);
            });
            buffer = match taken {
                Ok(Some(buffer)) => Some(buffer),
                Ok(None) => return Ok(Some(guard)),
                Err(error) => {
                    let path = request.file(&block).path().to_path_buf();
                    guard.end(Err(error.at_path(path)));
                    return Ok(None);
                }
            };
        }
        let mut block = InFlightOp::block(guard, block, buffer);
        match block.fill_buffer() {
            Ok(slices) if slices.is_empty() => self.submit_block(block)?,
            Ok(slices) => self.copy(CopyingBlock::Write(block), slices),
            Err(error) => block.guard.end(Err(error)),
        }
        Ok(None)
    }

    /// Submits the op of a block.
    pub(super) fn submit_block(&mut self, mut block: InFlightOp) -> Result<()> {
        match block.first_op() {
            Ok(op) => {
                if let Some(buffer) = block.bounced_read() {
                    self.bounce.read_started(buffer);
                }
                block.start(self.in_flight.len() + 1);
                let token = self.in_flight.insert(block);
                self.submit(Op { token, ..op })
            }
            Err(error) => {
                block.guard.end(Err(error));
                Ok(())
            }
        }
    }

    /// Starts to copy the slices of a block that belong to GPU memory.
    pub(super) fn copy(&mut self, copying: CopyingBlock, slices: Vec<GpuSlice>) {
        self.gpu.start(copying, slices, &self.bounce, &self.accounts);
    }

    pub(super) fn submit(&mut self, mut op: Op) -> Result<()> {
        WorkerStats::count(&self.accounts.stats.counters.ops, 1);
        self.unflushed_bytes += op.bytes() as u64;
        // The window leaves room for every op, so a busy backend only needs its completions reaped first.
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
            self.handle_completion(completion)?;
        }
        if self.completions.is_empty() {
            self.completions = completions;
        }
        Ok(())
    }

    /// Fails everything in flight, after the backend failed.
    pub(crate) fn abandon(self, error: &Error) {
        let Self { backend, gpu, mut in_flight, bounce, gds, .. } = self;
        gds.refused.into_iter().for_each(|(guard, _)| guard.end(Err(error.clone())));
        drop(backend);
        let copying = gpu.into_blocks();
        let completed = bounce.completed_reads.into_iter().map(|completed| completed.block);
        for op in in_flight.drain().into_iter().chain(completed).chain(copying) {
            op.guard.end(Err(error.clone()));
        }
    }
}
