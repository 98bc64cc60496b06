//! The batches of an engine: idle ones, and whether cuFile supports any.

use std::sync::atomic::{AtomicBool, AtomicU64};

use deepnvme_cuda::Batch;

use crate::sync::{Mutex, lock};

/// Maximum idle batches to keep for reuse, since creating one is slow.
const IDLE_MAX: usize = 64;

/// The batches of an engine.
#[derive(Debug, Default)]
pub(super) struct Batches {
    /// Each with its GPU.
    idle: Mutex<Vec<(u32, Batch)>>,
    /// Whether cuFile has refused a batch. From then on, each op is one call.
    pub(super) are_refused: AtomicBool,
    pub(super) submissions: AtomicU64,
}

impl Batches {
    /// Takes an idle batch for this GPU, if any.
    pub(super) fn take(&self, index: u32) -> Option<Batch> {
        let mut idle = lock(&self.idle);
        let place = idle.iter().position(|(gpu, _)| *gpu == index)?;
        Some(idle.swap_remove(place).1)
    }

    /// Keeps a batch without transfers in flight for reuse, or drops it if enough are kept.
    pub(super) fn put_back(&self, index: u32, batch: Batch) {
        let mut idle = lock(&self.idle);
        if idle.len() < IDLE_MAX {
            idle.push((index, batch));
        }
    }
}
