//! An item, its state, and how it may be borrowed.

use std::collections::VecDeque;
use std::sync::Arc;

use super::index::Filing;
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

/// Where an item's bytes are. `slot` is the offset of its slot in the arena.
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
    pub(super) readers: u32,
    pub(super) has_writer: bool,
    /// Threads that wait for the item's bytes.
    pub(super) borrow_waiters: u32,
    /// Threads that wait for a slot to write new bytes into.
    pub(super) create_waiters: u32,
    /// The places in the queue of all these threads, ascending.
    pub(super) tickets: VecDeque<u64>,
    pub(super) prefetch_rank: Option<u64>,
    /// Whether it is one of the first prefetches.
    pub(super) is_prefetched_soon: bool,
    /// Its entry of the schedule.
    pub(super) entry: Option<usize>,
    /// How many of its scheduled uses are in the read-ahead window.
    pub(super) uses_ahead: u32,
    /// The clock at the last borrow in memory.
    pub(super) last_use: u64,
    pub(super) write_failed: bool,
    pub(super) read_failed: bool,
    pub(super) is_deleted: bool,
    /// Whether a flush has requested it and it is not on disk yet. Until then, no borrow may change it again.
    pub(super) is_flushing: bool,
    /// How many flushes of the item have succeeded.
    pub(super) flushes_ended: u64,
    /// How the index has it.
    pub(super) filing: Filing,
}

impl Item {
    pub(super) fn new(key: &Arc<str>, slot_bytes: usize, on_disk: bool, clock: u64) -> Self {
        Self {
            key: Arc::clone(key),
            slot_bytes,
            state: ItemState::Absent,
            on_disk,
            readers: 0,
            has_writer: false,
            borrow_waiters: 0,
            create_waiters: 0,
            tickets: VecDeque::new(),
            prefetch_rank: None,
            is_prefetched_soon: false,
            entry: None,
            uses_ahead: 0,
            last_use: clock,
            write_failed: false,
            read_failed: false,
            is_deleted: false,
            is_flushing: false,
            flushes_ended: 0,
            filing: Filing::default(),
        }
    }

    pub(super) fn is_borrowed(&self) -> bool {
        self.has_writer || self.readers > 0
    }

    /// Whether no thread holds the item or waits for it.
    pub(super) fn is_idle(&self) -> bool {
        !self.is_borrowed() && self.borrow_waiters == 0 && self.create_waiters == 0
    }

    pub(super) fn is_in_flight(&self) -> bool {
        matches!(self.state, ItemState::Reading { .. } | ItemState::Writing { .. })
    }

    pub(super) fn is_writable(&self) -> bool {
        matches!(self.state, ItemState::Dirty { .. }) && !self.has_writer
    }

    /// Whether its slot may be given to another item, at once or after a write-back.
    pub(super) fn is_evictable(&self) -> bool {
        let is_kept = match self.state {
            ItemState::Clean { .. } | ItemState::Writing { .. } => false,
            ItemState::Dirty { .. } => self.write_failed,
            ItemState::Absent | ItemState::Reserved { .. } | ItemState::Reading { .. } => true,
        };
        !is_kept && self.is_idle()
    }

    /// Whether it is needed soon: it is in the read-ahead window.
    pub(super) fn is_ahead(&self) -> bool {
        !self.is_borrowed() && (self.is_prefetched_soon || self.uses_ahead > 0)
    }

    /// Whether a waiter for it lacks a slot.
    pub(super) fn lacks_slot(&self) -> bool {
        self.state == ItemState::Absent && !self.read_failed && !self.tickets.is_empty()
    }

    /// Whether memory has bytes that the disk lacks, or may come to have some.
    pub(super) fn needs_flush(&self) -> bool {
        self.has_writer
            || matches!(self.state, ItemState::Dirty { .. } | ItemState::Writing { .. } | ItemState::Reserved { .. })
    }

    /// How it counts, with this next use.
    pub(super) fn filing_with(&self, next_use: NextUse) -> Filing {
        let (is_idle, is_ahead, is_evictable) = (self.is_idle(), self.is_ahead(), self.is_evictable());
        let is_clean = is_evictable && matches!(self.state, ItemState::Clean { .. });
        let is_missing = is_ahead && self.state == ItemState::Absent && self.on_disk && !self.read_failed;
        let is_spare = matches!(self.state, ItemState::Writing { changed: false, .. }) || (is_clean && !is_ahead);
        let is_budgeted = is_ahead && !self.is_prefetched_soon;
        Filing {
            next_use: (is_evictable || is_missing).then_some(next_use),
            is_clean,
            is_evictable,
            is_write_back: is_evictable && matches!(self.state, ItemState::Dirty { .. }) && !is_ahead,
            is_missing,
            is_flush: self.is_flushing && self.is_writable() && !self.write_failed,
            write_failed: self.write_failed,
            is_reaping: self.is_deleted && is_idle && self.is_in_flight(),
            ticket: self.tickets.front().copied().filter(|_| self.lacks_slot()),
            pin: self.state.slot().filter(|_| !is_evictable).map(|slot| (slot, self.slot_bytes)),
            spare_bytes: if is_spare { self.slot_bytes } else { 0 },
            window_bytes: if is_budgeted { self.slot_bytes } else { 0 },
            slot_bytes: self.slot_bytes,
        }
    }

    pub(super) fn waiters_mut(&mut self, mode: BorrowMode) -> &mut u32 {
        if mode == BorrowMode::Create { &mut self.create_waiters } else { &mut self.borrow_waiters }
    }
}
