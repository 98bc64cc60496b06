//! Small transfers run on the waiting caller's own thread, without a thread switch.

use std::sync::Arc;

use smallvec::SmallVec;

use super::mover::{Mover, SlotSetup};
use super::window::Window;
use crate::backend::Backend;
use crate::backend::inline::InlineBackend;
use crate::config::Config;
use crate::config::limits::{HAND_BYTES_MAX, HAND_SLOT_BYTES};
use crate::error::Result;
use crate::gpu::EngineGpus;
use crate::request::{Request, RequestQueue, WorkGuard, WorkKind};
use crate::split::BlockPlan;
use crate::stats::WorkerStats;
use crate::sync::{Mutex, lock};
use crate::trace::{Recorder, Tape};

/// A block and two ragged edges.
const BLOCKS_MAX: u64 = 3;

/// Movers that callers borrow.
pub(crate) struct Hands {
    resting: Mutex<Vec<Mover<InlineBackend>>>,
}

impl std::fmt::Debug for Hands {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Hands({} resting)", lock(&self.resting).len())
    }
}

impl Hands {
    pub(crate) fn new(
        stats: &Arc<WorkerStats>,
        config: &Config,
        gpus: &Arc<EngineGpus>,
        recorder: &Arc<Recorder>,
    ) -> Self {
        let slots =
            SlotSetup { slot_bytes: HAND_SLOT_BYTES as usize, slots: 1, lock_pool: config.lock_pool, register: false };
        let mover = || {
            let backend = InlineBackend::default();
            let window = Window::fixed(backend.depth());
            Mover::new(backend, window, (Arc::clone(stats), Tape::new(recorder, None)), slots, gpus)
        };
        Self { resting: Mutex::new((0..config.hand_slots()).map(|_| mover()).collect()) }
    }

    /// Runs the whole request now if it is small and a mover is free. Returns whether it did. Its syncs go to the
    /// workers.
    pub(crate) fn make(&self, request: &Arc<Request>, queue: &Arc<RequestQueue>) -> Result<bool> {
        // With GPU memory, a worker waits for the GPU instead of the caller.
        if request.has_gpu_memory() || !is_small(&request.plan) {
            return Ok(false);
        }
        let Some(mut mover) = lock(&self.resting).pop() else { return Ok(false) };
        let caller = queue.enter_inline(request)?;
        let guard = |kind| WorkGuard::new(Arc::clone(request), Arc::clone(queue), kind);
        let preparation = request.claim_preparation().then(|| guard(WorkKind::Prepare));
        // Claims all blocks before the preparation ends, which would offer the rest to the workers.
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
            // The only bounce buffer is free: the previous block has completed.
            mover.start_block(guard, index)?;
            while !mover.is_idle() {
                mover.reap(true)?;
                while mover.unload()? {}
            }
        }
        drop(caller);
        lock(&self.resting).push(mover);
        Ok(true)
    }
}

fn is_small(plan: &BlockPlan) -> bool {
    let blocks = plan.block_count();
    (1..=BLOCKS_MAX).contains(&blocks)
        && plan.bytes_total() <= HAND_BYTES_MAX
        && (0..blocks).map(|index| plan.block(index).io).all(|io| io.end - io.start <= HAND_SLOT_BYTES)
}
