//! One item: where its bytes are, and the threads that borrow it or wait for it.

use std::sync::Arc;

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
    pub(super) prefetch_rank: Option<u64>,
    /// The clock at the last borrow in memory.
    pub(super) last_use: u64,
    pub(super) write_failed: bool,
    pub(super) read_failed: bool,
    pub(super) is_deleted: bool,
    /// How many flushes of the item have succeeded.
    pub(super) flushes_ended: u64,
}

impl ItemState {
    /// Returns the offset of the slot, if the item has one.
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

impl Item {
    /// Returns whether no thread holds the item or waits for it.
    pub(super) fn is_idle(&self) -> bool {
        !self.has_writer && self.readers == 0 && self.borrow_waiters == 0 && self.create_waiters == 0
    }

    pub(super) fn is_in_flight(&self) -> bool {
        matches!(self.state, ItemState::Reading { .. } | ItemState::Writing { .. })
    }

    pub(super) fn is_writable(&self) -> bool {
        matches!(self.state, ItemState::Dirty { .. }) && !self.has_writer
    }

    /// Returns whether memory has bytes that the disk lacks, or soon may.
    pub(super) fn needs_flush(&self) -> bool {
        self.has_writer
            || matches!(self.state, ItemState::Dirty { .. } | ItemState::Writing { .. } | ItemState::Reserved { .. })
    }

    /// Returns the number of threads that wait to borrow in this mode.
    pub(super) fn waiters_mut(&mut self, mode: BorrowMode) -> &mut u32 {
        if mode == BorrowMode::Create { &mut self.create_waiters } else { &mut self.borrow_waiters }
    }
}
