//! The route through cuFile: whether a block may take it, and the blocks that cuFile has refused.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::backend::gds::Gds;
use crate::config::DirectMode;
use crate::error::{Error, ErrorKind, Result};
use crate::request::WorkGuard;
use crate::split::{Block, Route};
use crate::stats::WorkerStats;
use crate::sync::lock;

/// cuFile, and whether GPU transfers use it.
#[derive(Clone, Debug)]
pub(crate) struct GdsSetup {
    pub(crate) gds: Arc<Gds>,
    pub(crate) mode: DirectMode,
}

/// The use of cuFile by a worker.
#[derive(Default)]
pub(super) struct GdsRoute {
    /// `None` if cuFile is disabled.
    setup: Option<GdsSetup>,
    /// Blocks that cuFile has refused. They wait for a bounce buffer.
    pub(super) refused: VecDeque<(WorkGuard, Block)>,
}

/// Returns the error of a request that requires GPUDirect Storage.
pub(crate) fn gds_required(reason: &str) -> Error {
    let detail =
        format!("{reason}; GPUDirect Storage is required by gds=\"required\": resolve that, or use gds=\"preferred\"");
    Error::new(ErrorKind::Unsupported, "use GPU memory", detail)
}

impl GdsRoute {
    pub(super) fn new(setup: GdsSetup) -> Self {
        Self { setup: (setup.mode != DirectMode::Disabled).then_some(setup), refused: VecDeque::new() }
    }

    /// Registers the file of a block with cuFile. Returns the reason if the block cannot take this route.
    pub(super) fn prepare(&self, guard: &WorkGuard, block: &Block) -> Result<(), String> {
        let Some(setup) = &self.setup else { return Err("this engine was created with gds=\"disabled\"".into()) };
        let file = guard.request().file(block);
        file.part_at(block.io.start).0.prepare_gds(&setup.gds)
    }

    /// Records why a block does not use cuFile. Fails if cuFile is required.
    pub(super) fn fall_back(&self, reason: &str, stats: &WorkerStats) -> Result<()> {
        if self.setup.as_ref().is_some_and(|setup| setup.mode == DirectMode::Required) {
            return Err(gds_required(reason));
        }
        lock(&stats.gds_reason).get_or_insert_with(|| reason.to_owned());
        Ok(())
    }

    /// Splits a block that cuFile does not take into blocks of the size of bounce buffers, and queues these.
    pub(super) fn queue_for_bounce(&mut self, guard: WorkGuard, block: &Block, buffer_bytes: usize) {
        let starts = (block.range.start..block.range.end).step_by(buffer_bytes);
        let guards = guard.split((block.range.end - block.range.start).div_ceil(buffer_bytes as u64));
        for (guard, start) in guards.into_iter().zip(starts) {
            let range = start..(start + buffer_bytes as u64).min(block.range.end);
            let smaller = Block { io: range.clone(), range, route: Route::Bounce, ..block.clone() };
            self.refused.push_back((guard, smaller));
        }
    }
}
