//! An item, its state, and how it may be borrowed.

use std::collections::VecDeque;
use std::sync::Arc;

use super::index::{IndexEntry, SortedSets};
use crate::next_use::NextUse;

/// How an item is borrowed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum BorrowMode {
    /// Read it in memory.
    Shared,
    /// Change it in memory.
    Exclusive,
    /// Write new bytes into its memory, whatever is there.
    Create,
    /// Read it on disk, where it does not change meanwhile.
    DiskShared,
    /// Change it on disk, or delete it.
    DiskExclusive,
}

impl BorrowMode {
    pub(crate) fn is_exclusive(self) -> bool {
        matches!(self, Self::Exclusive | Self::Create | Self::DiskExclusive)
    }

    pub(crate) fn needs_memory(self) -> bool {
        matches!(self, Self::Shared | Self::Exclusive | Self::Create)
    }
}

/// Where an item's bytes are. `slot` is the offset of its slot in the arena. A `Reserved` slot waits for a thread that
/// writes new bytes into it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ItemState {
    Absent,
    Reserved { slot: usize },
    Reading { slot: usize },
    Clean { slot: usize },
    Dirty { slot: usize },
    Writing { slot: usize, changed: bool },
}

impl ItemState {
    pub(super) fn slot(self) -> Option<usize> {
        match self {
            Self::Absent => None,
            Self::Reserved { slot }
            | Self::Reading { slot }
            | Self::Clean { slot }
            | Self::Dirty { slot }
            | Self::Writing { slot, .. } => Some(slot),
        }
    }
}

/// An item, as far as decisions need it.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    pub(super) key: Arc<str>,
    pub(super) slot_bytes: usize,
    pub(super) state: ItemState,
    /// Whether the disk has the bytes, or had the last complete ones.
    pub(super) on_disk: bool,
    pub(super) borrows: Borrows,
    pub(super) waiters: Waiters,
    pub(super) uses: Uses,
    pub(super) failed: Failed,
    pub(super) flush: Flush,
    pub(super) is_deleted: bool,
    /// Its entry in the index.
    pub(super) index_entry: IndexEntry,
}

/// The borrows of an item that have not ended.
#[derive(Clone, Debug, Default)]
pub(super) struct Borrows {
    pub(super) readers: u32,
    pub(super) has_writer: bool,
}

/// The threads that wait for an item.
#[derive(Clone, Debug, Default)]
pub(super) struct Waiters {
    /// Those that wait for its bytes.
    pub(super) for_bytes: u32,
    /// Those that wait for a slot to write new bytes into.
    pub(super) for_new_slot: u32,
    /// The places of all of them in the queue, ascending.
    pub(super) tickets: VecDeque<u64>,
}

/// The last use of an item, and the next ones as far as they are known.
#[derive(Clone, Debug)]
pub(super) struct Uses {
    /// The clock at the last borrow in memory.
    pub(super) last: u64,
    pub(super) prefetch_rank: Option<u64>,
    /// Whether it is one of the prefetches in the read-ahead window.
    pub(super) is_prefetch_in_window: bool,
    /// Its entry of the schedule.
    pub(super) entry: Option<usize>,
    /// How many of its scheduled uses are in the read-ahead window.
    pub(super) ahead: u32,
}

/// Whether the last read and the last write of an item failed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Failed {
    pub(super) read: bool,
    pub(super) write: bool,
}

/// The flushes of an item.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Flush {
    /// Whether one has requested the item and it is not on disk yet. Until then, no borrow may change it again.
    pub(super) is_requested: bool,
    /// How many have succeeded.
    pub(super) ended: u64,
}

impl Item {
    pub(super) fn new(key: &Arc<str>, slot_bytes: usize, on_disk: bool, clock: u64) -> Self {
        Self {
            key: Arc::clone(key),
            slot_bytes,
            state: ItemState::Absent,
            on_disk,
            borrows: Borrows::default(),
            waiters: Waiters::default(),
            uses: Uses { last: clock, prefetch_rank: None, is_prefetch_in_window: false, entry: None, ahead: 0 },
            failed: Failed::default(),
            flush: Flush::default(),
            is_deleted: false,
            index_entry: IndexEntry::default(),
        }
    }

    pub(super) fn is_borrowed(&self) -> bool {
        self.borrows.has_writer || self.borrows.readers > 0
    }

    /// Whether no thread holds the item or waits for it.
    pub(super) fn is_idle(&self) -> bool {
        !self.is_borrowed() && self.waiters.for_bytes == 0 && self.waiters.for_new_slot == 0
    }

    pub(super) fn is_in_flight(&self) -> bool {
        matches!(self.state, ItemState::Reading { .. } | ItemState::Writing { .. })
    }

    pub(super) fn is_writable(&self) -> bool {
        matches!(self.state, ItemState::Dirty { .. }) && !self.borrows.has_writer
    }

    /// Whether its slot may be given to another item, at once or after a write-back.
    pub(super) fn is_evictable(&self) -> bool {
        let is_kept = match self.state {
            ItemState::Clean { .. } | ItemState::Writing { .. } => false,
            ItemState::Dirty { .. } => self.failed.write,
            ItemState::Absent | ItemState::Reserved { .. } | ItemState::Reading { .. } => true,
        };
        !is_kept && self.is_idle()
    }

    /// Whether it is needed soon: it is in the read-ahead window.
    pub(super) fn is_ahead(&self) -> bool {
        !self.is_borrowed() && (self.uses.is_prefetch_in_window || self.uses.ahead > 0)
    }

    /// Whether a waiter for it lacks a slot.
    pub(super) fn lacks_slot(&self) -> bool {
        self.state == ItemState::Absent && !self.failed.read && !self.waiters.tickets.is_empty()
    }

    /// Whether memory has bytes that the disk lacks, or may come to have some.
    pub(super) fn needs_flush(&self) -> bool {
        self.borrows.has_writer
            || matches!(self.state, ItemState::Dirty { .. } | ItemState::Writing { .. } | ItemState::Reserved { .. })
    }

    /// Its entry in the index, given its next use.
    pub(super) fn index_entry_with(&self, next_use: NextUse) -> IndexEntry {
        let (is_idle, is_ahead, is_evictable) = (self.is_idle(), self.is_ahead(), self.is_evictable());
        let sets = SortedSets {
            clean: is_evictable && matches!(self.state, ItemState::Clean { .. }),
            evictable: is_evictable,
            write_back: is_evictable && matches!(self.state, ItemState::Dirty { .. }) && !is_ahead,
            missing: is_ahead && self.state == ItemState::Absent && self.on_disk && !self.failed.read,
        };
        let is_spare = matches!(self.state, ItemState::Writing { changed: false, .. }) || (sets.clean && !is_ahead);
        let is_budgeted = is_ahead && !self.uses.is_prefetch_in_window;
        IndexEntry {
            sorted: (!sets.is_empty()).then_some((next_use, sets)),
            is_flush: self.flush.is_requested && self.is_writable() && !self.failed.write,
            write_failed: self.failed.write,
            is_removing: self.is_deleted && is_idle && self.is_in_flight(),
            ticket: self.waiters.tickets.front().copied().filter(|_| self.lacks_slot()),
            pin: self.state.slot().filter(|_| !is_evictable).map(|slot| (slot, self.slot_bytes)),
            spare_bytes: if is_spare { self.slot_bytes } else { 0 },
            window_bytes: if is_budgeted { self.slot_bytes } else { 0 },
            slot_bytes: self.slot_bytes,
        }
    }

    pub(super) fn waiters_mut(&mut self, mode: BorrowMode) -> &mut u32 {
        if mode == BorrowMode::Create { &mut self.waiters.for_new_slot } else { &mut self.waiters.for_bytes }
    }
}
