//! Small requests run on the thread of their caller if it waits for them: no switch to a worker's thread.

use std::sync::Arc;

use smallvec::SmallVec;

use super::accounts::Accounts;
use super::bounce::BounceSetup;
use super::io_loop::IoLoop;
use super::window::Window;
use crate::backend::Backend;
use crate::backend::inline::InlineBackend;
use crate::config::Config;
use crate::config::limits::{INLINE_BUFFER_BYTES, INLINE_BYTES_MAX};
use crate::error::Result;
use crate::gpu::EngineGpus;
use crate::request::{Request, RequestQueue, WorkGuard, WorkKind};
use crate::split::BlockPlan;
use crate::stats::WorkerStats;
use crate::sync::{Mutex, lock};
use crate::trace::{Recorder, Tracer};

/// Maximum number of blocks of a request that its caller runs: one aligned block, and a ragged edge at either end.
const BLOCKS_MAX: u64 = 3;

/// Runs small requests on the threads of their callers, each with an I/O loop that is free.
pub(crate) struct InlineExecutor {
    idle: Mutex<Vec<IoLoop<InlineBackend>>>,
}

impl std::fmt::Debug for InlineExecutor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "InlineExecutor({} idle)", lock(&self.idle).len())
    }
}

impl InlineExecutor {
    pub(crate) fn new(
        stats: &Arc<WorkerStats>,
        config: &Config,
        gpus: &Arc<EngineGpus>,
        recorder: &Arc<Recorder>,
    ) -> Self {
        let bounce = BounceSetup {
            buffer_bytes: INLINE_BUFFER_BYTES as usize,
            buffers: 1,
            lock_pool: config.lock_pool,
            register: false,
        };
        let io_loop = || {
            let backend = InlineBackend::default();
            let window = Window::fixed(backend.depth());
            let accounts = Accounts { stats: Arc::clone(stats), tracer: Tracer::new(recorder, None) };
            IoLoop::new(backend, window, accounts, bounce, gpus)
        };
        Self { idle: Mutex::new((0..config.inline_buffers()).map(|_| io_loop()).collect()) }
    }

    /// Runs the whole request now if it is small and an I/O loop is free. Returns whether it did. Its syncs go to the
    /// workers.
    pub(crate) fn try_run(&self, request: &Arc<Request>, queue: &Arc<RequestQueue>) -> Result<bool> {
        // With GPU memory, a worker waits for the GPU instead of the caller.
        if request.has_gpu_memory() || !is_small(&request.plan) {
            return Ok(false);
        }
        let Some(mut io_loop) = lock(&self.idle).pop() else { return Ok(false) };
        let caller = queue.enter_inline(request)?;
        let guard = |kind| WorkGuard::new(Arc::clone(request), Arc::clone(queue), kind);
        let preparation = request.claim_preparation().then(|| guard(WorkKind::Prepare));
        // Claim all blocks before the preparation ends: its end offers unclaimed blocks to the workers.
        let blocks: SmallVec<[_; BLOCKS_MAX as usize]> =
            std::iter::from_fn(|| request.claim_block().map(|index| (index, guard(WorkKind::Block)))).collect();
        if let Some(guard) = preparation {
            super::prepare(guard);
        }
        for (index, guard) in blocks {
            if request.has_failed() {
                guard.end(Ok(0));
                continue;
            }
            // The loop has one bounce buffer. It is free, since the previous block has completed.
            io_loop.start_block(guard, index)?;
            while !io_loop.is_idle() {
                io_loop.reap(true)?;
                while io_loop.copy_completed_read()? {}
            }
        }
        drop(caller);
        lock(&self.idle).push(io_loop);
        Ok(true)
    }
}

fn is_small(plan: &BlockPlan) -> bool {
    let blocks = plan.block_count();
    (1..=BLOCKS_MAX).contains(&blocks)
        && plan.bytes_total() <= INLINE_BYTES_MAX
        && (0..blocks).map(|index| plan.block(index).io).all(|io| io.end - io.start <= INLINE_BUFFER_BYTES)
}
