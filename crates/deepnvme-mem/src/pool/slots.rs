//! The slots of a pool: which are free, and where each one's memory is.

use std::sync::PoisonError;

use crate::lock::LockState;
use crate::region_mut::RegionMut;
use crate::span::Span;
use crate::sync::{Condvar, Mutex, MutexGuard};

/// The memory of all slots, and which of them are free.
pub(super) struct Slots {
    pub(super) arena: RegionMut,
    pub(super) lock_state: LockState,
    pub(super) slot_bytes: usize,
    pub(super) stride_bytes: usize,
    pub(super) count: usize,
    /// Indices of the free slots. The one that came back last goes out first, since its bytes may still be cached.
    pub(super) free: Mutex<Vec<usize>>,
    pub(super) returned: Condvar,
}

impl Slots {
    /// The memory of one slot. Only who holds the slot may ask.
    pub(super) fn memory(&self, index: usize) -> Span {
        let start = index * self.stride_bytes;
        self.arena.0.slice(start..start + self.slot_bytes)
    }

    /// Takes a slot back and wakes one who waits.
    pub(super) fn give_back(&self, index: usize) {
        let mut free = self.lock_free();
        debug_assert!(!free.contains(&index), "slot {index} came back twice");
        free.push(index);
        drop(free);
        self.returned.notify_one();
    }

    /// The list is whole after every statement, so that a panic elsewhere cannot have spoilt it.
    pub(super) fn lock_free(&self) -> MutexGuard<'_, Vec<usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
