//! The batches of an engine: those that rest, and whether cuFile has any.

use std::sync::atomic::{AtomicBool, AtomicU64};

use deepnvme_cuda::Batch;

use crate::sync::{Mutex, lock};

/// Batches that rest, for the next submission: to make one takes long.
const RESTING_MAX: usize = 64;

/// What an engine has of batches.
#[derive(Debug, Default)]
pub(super) struct Batches {
    /// With the GPU that each is for.
    resting: Mutex<Vec<(u32, Batch)>>,
    /// Whether cuFile has refused one: then calls are made one by one from there on.
    pub(super) are_refused: AtomicBool,
    pub(super) submissions: AtomicU64,
}

impl Batches {
    /// One for that GPU, if one rests.
    pub(super) fn take(&self, index: u32) -> Option<Batch> {
        let mut resting = lock(&self.resting);
        let place = resting.iter().position(|(gpu, _)| *gpu == index)?;
        Some(resting.swap_remove(place).1)
    }

    /// Keeps one that nothing is left in.
    pub(super) fn put_back(&self, index: u32, batch: Batch) {
        let mut resting = lock(&self.resting);
        if resting.len() < RESTING_MAX {
            resting.push((index, batch));
        }
    }
}
