//! A batch of transfers.

use super::transfer::Transfer;
use crate::abi::cufile::IoEvent;
use crate::rng::Rng;
use crate::state::clock::Point;

/// A batch.
pub(crate) struct Batch {
    pub(crate) capacity: usize,
    pub(crate) waiting: Vec<BatchEntry>,
    /// Number of entries in progress: none or one.
    pub(crate) running: usize,
    pub(crate) completed: Vec<(IoEvent, Point)>,
    pub(crate) rng: Rng,
}

/// An entry that has not begun.
pub(crate) struct BatchEntry {
    pub(crate) cookie: usize,
    pub(crate) point: Point,
    pub(crate) transfer: Transfer,
}

impl Batch {
    /// Returns the number of entries that were not reported.
    pub(crate) fn outstanding(&self) -> usize {
        self.waiting.len() + self.running + self.completed.len()
    }
}
