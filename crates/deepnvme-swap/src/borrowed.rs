//! A borrowed item.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use deepnvme_io::mem::{Region, RegionMut};

use crate::deadlock::ThreadNumber;
use crate::io_scheduler::IoScheduler;
use crate::residency::BorrowMode;
use crate::slot_allocator::ItemId;
use crate::store::DiskLocation;

/// An item that keeps its place until this is dropped.
///
/// An exclusively borrowed item is changed in place and written back later, unless [`Borrowed::mark_clean`] is called.
/// A created item counts only after [`Borrowed::commit`]. Its predecessor is gone by then: if the created item is
/// dropped without a commit, by an early return or a panic, the key has no item.
#[derive(Debug)]
pub struct Borrowed {
    scheduler: Arc<IoScheduler>,
    id: ItemId,
    /// `None` if it is borrowed on disk.
    slot: Option<usize>,
    bytes: usize,
    mode: BorrowMode,
    thread: ThreadNumber,
    is_dirty: std::sync::atomic::AtomicBool,
    /// Whether a created item is complete.
    is_committed: bool,
}

impl Borrowed {
    pub(crate) fn new(
        scheduler: &Arc<IoScheduler>,
        id: ItemId,
        place: (Option<usize>, usize),
        mode: BorrowMode,
        thread: ThreadNumber,
    ) -> Self {
        let (slot, bytes) = place;
        let is_dirty = matches!(mode, BorrowMode::Exclusive | BorrowMode::Create).into();
        Self { scheduler: Arc::clone(scheduler), id, slot, bytes, mode, thread, is_dirty, is_committed: false }
    }

    /// The item's id. An item that replaces another one of the same size may keep its id. Any other item has a new one.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The offset of its first byte in the arena; `None` if it is borrowed on disk.
    #[must_use]
    pub fn offset(&self) -> Option<usize> {
        self.slot
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Whether it may be changed.
    #[must_use]
    pub fn is_exclusive(&self) -> bool {
        self.mode.is_exclusive()
    }

    /// Its memory, to read. The view is invalid after the borrow ends: its memory is reused.
    ///
    /// # Panics
    /// If it is not in memory.
    #[must_use]
    pub fn region(&self) -> Region {
        self.scheduler.arena.region(self.range())
    }

    /// Its memory, to change.
    ///
    /// # Panics
    /// If it is not in memory, or is borrowed shared.
    #[must_use]
    pub fn target(&self) -> RegionMut {
        assert!(self.is_exclusive(), "an item that is borrowed shared must not be changed");
        self.scheduler.arena.region_mut(self.range())
    }

    /// Declares that it was not changed, so it need not be written back.
    pub fn mark_clean(&self) {
        // A created item has no other copy.
        self.is_dirty.store(self.mode == BorrowMode::Create, Ordering::Relaxed);
    }

    /// Declares that it was changed, which is the default for an exclusive borrow.
    pub fn mark_dirty(&self) {
        self.is_dirty.store(self.is_exclusive(), Ordering::Relaxed);
    }

    /// Declares that a shared item was changed against the rules, so that it is written back. Otherwise the old bytes
    /// would return with the next read, but only then. Returns false for an attached item, which is never written.
    #[must_use]
    pub fn keep_change(&self) -> bool {
        let stored = self.scheduler.store().get(self.id).map(|stored| matches!(stored.location, DiskLocation::Swap(_)));
        let is_writable = stored.unwrap_or(true);
        self.is_dirty.store(is_writable, Ordering::Relaxed);
        is_writable
    }

    /// Completes a created item, so that others may borrow it.
    pub fn commit(mut self) {
        self.is_committed = true;
    }

    /// As [`commit`](Self::commit), with a text that stays with the item.
    pub fn commit_as(self, label: &str) {
        // Before other threads can borrow the item.
        self.scheduler.store().set_label(self.id, label);
        self.commit();
    }

    /// The text given when the item was committed, attached or imported.
    #[must_use]
    pub fn label(&self) -> Arc<str> {
        self.scheduler.store().get(self.id).map_or_else(|| Arc::from(""), |stored| Arc::clone(&stored.label))
    }

    pub(crate) fn scheduler(&self) -> &Arc<IoScheduler> {
        &self.scheduler
    }

    #[expect(clippy::expect_used, reason = "documented as a panic")]
    fn range(&self) -> std::ops::Range<usize> {
        let slot = self.slot.expect("the item is not in memory");
        slot..slot + self.bytes
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        // In a forked child, a lock may never be released.
        if self.scheduler.creator.is_current() {
            if self.mode == BorrowMode::Create && !self.is_committed {
                self.scheduler.items.delete(self.id);
            }
            let is_dirty = self.is_dirty.load(Ordering::Relaxed);
            self.scheduler.items.end_borrow(self.id, self.mode, self.thread, is_dirty);
            self.scheduler.run_or_wake();
        }
    }
}
