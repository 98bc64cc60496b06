//! The items, and how each borrow, read and write changes their state.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use super::item::{BorrowMode, Item, ItemState};
use crate::next_use::NextUseQueue;
use crate::slot_allocator::{ItemId, SlotAllocator};

/// The owner of slots whose memory was lost to an engine error.
const LOST: ItemId = ItemId::MAX;

/// A flush of an item that has begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PendingFlush {
    pub(crate) id: ItemId,
    /// The item's `flushes_ended` when it began.
    ended_before: u64,
}

/// The answer to a request for an item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BorrowResult {
    /// Borrowed until it is released, with its slot if it is in memory.
    Borrowed(Option<usize>),
    /// Other borrows exclude this one.
    HeldByOthers,
    /// A read, a write or another thread's `create` has to end first.
    IoPending,
    /// It needs a slot in memory.
    NeedsSlot,
    /// The item no longer exists.
    Deleted,
}

/// The next step of the scheduler.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Action {
    /// Read an item into its slot.
    Read { id: ItemId, slot: usize },
    /// Write an item from its slot.
    Write { id: ItemId, slot: usize },
    /// No I/O: a waiter was given a slot for new bytes.
    SlotReserved,
}

/// Where the bytes of an item are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Residence {
    /// In memory, and perhaps on disk.
    Memory,
    /// On disk only.
    Disk,
    /// Being read, or not written anywhere yet.
    Neither,
}

/// Limits on early reads and writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Budgets {
    /// Bytes of upcoming items that may be in memory before they are used.
    pub(crate) prefetch_bytes: usize,
    /// Bytes of memory that are kept free or evictable.
    pub(crate) headroom_bytes: usize,
}

/// The state of all items and of the arena.
#[derive(Debug)]
pub(crate) struct Residency {
    pub(super) items: BTreeMap<ItemId, Item>,
    pub(super) keys: HashMap<Arc<str>, ItemId>,
    pub(super) slots: SlotAllocator,
    pub(super) budgets: Budgets,
    pub(super) next_uses: NextUseQueue,
    pub(super) prefetches: VecDeque<ItemId>,
    next_prefetch_rank: u64,
    /// Items that need a slot, in order of arrival.
    pub(super) waiters: VecDeque<ItemId>,
    /// Items that a flush has requested and that are not on disk yet. Until then, no borrow may change them again.
    pub(super) flushing: BTreeSet<ItemId>,
    /// Deleted items whose disk space can be freed.
    reaped: Vec<ItemId>,
    next_id: ItemId,
    pub(super) clock: u64,
    pub(super) in_flight: usize,
    pub(crate) evictions: u64,
}

impl Residency {
    pub(crate) fn new(arena_bytes: usize, budgets: Budgets) -> Self {
        Self {
            items: BTreeMap::new(),
            keys: HashMap::new(),
            slots: SlotAllocator::new(arena_bytes),
            budgets,
            next_uses: NextUseQueue::default(),
            prefetches: VecDeque::new(),
            next_prefetch_rank: 0,
            waiters: VecDeque::new(),
            flushing: BTreeSet::new(),
            reaped: Vec::new(),
            next_id: 0,
            clock: 0,
            in_flight: 0,
            evictions: 0,
        }
    }

    /// Adds an item, which is on disk already or will be created in memory. The key must be free.
    pub(crate) fn add(&mut self, key: &Arc<str>, slot_bytes: usize, on_disk: bool) -> ItemId {
        let id = self.next_id;
        self.next_id += 1;
        let before = self.keys.insert(Arc::clone(key), id);
        debug_assert!(before.is_none(), "{key} exists already");
        let item = Item {
            key: Arc::clone(key),
            slot_bytes,
            state: ItemState::Absent,
            on_disk,
            readers: 0,
            has_writer: false,
            borrow_waiters: 0,
            create_waiters: 0,
            prefetch_rank: None,
            last_use: self.clock,
            write_failed: false,
            read_failed: false,
            is_deleted: false,
            flushes_ended: 0,
        };
        self.items.insert(id, item);
        id
    }

    pub(crate) fn find(&self, key: &str) -> Option<ItemId> {
        self.keys.get(key).copied()
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = (&Arc<str>, ItemId)> {
        self.keys.iter().map(|(key, id)| (key, *id))
    }

    pub(crate) fn len(&self) -> usize {
        self.keys.len()
    }

    /// Bytes of memory in use.
    pub(crate) fn resident_bytes(&self) -> usize {
        self.slots.len() - self.slots.free_bytes()
    }

    /// Reads and writes in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Sets the order in which items will be used from now on.
    pub(crate) fn schedule(&mut self, order: NextUseQueue) {
        self.next_uses = order;
    }

    /// Requests that an item is read before it is borrowed.
    pub(crate) fn prefetch(&mut self, id: ItemId) {
        let rank = self.next_prefetch_rank;
        if let Some(item) = self.items.get_mut(&id).filter(|item| !item.is_deleted) {
            item.read_failed = false;
            if item.prefetch_rank.is_none() {
                self.next_prefetch_rank += 1;
                item.prefetch_rank = Some(rank);
                self.prefetches.push_back(id);
            }
        }
    }

    /// Borrows an item, if that is possible now.
    pub(crate) fn try_borrow(&mut self, id: ItemId, mode: BorrowMode) -> BorrowResult {
        let Some(item) = self.items.get_mut(&id).filter(|item| !item.is_deleted) else { return BorrowResult::Deleted };
        if item.has_writer || (mode.is_exclusive() && item.readers > 0) {
            return BorrowResult::HeldByOthers;
        }
        // Threads that keep changing an item must not keep a flush from writing it.
        if matches!(mode, BorrowMode::Exclusive | BorrowMode::Create)
            && matches!(item.state, ItemState::Dirty { .. } | ItemState::Writing { .. })
            && self.flushing.contains(&id)
        {
            return BorrowResult::IoPending;
        }
        let slot = match (mode, item.state) {
            (BorrowMode::DiskExclusive, ItemState::Reading { .. } | ItemState::Writing { .. }) => {
                return BorrowResult::IoPending;
            }
            // Another thread is creating the item.
            (BorrowMode::DiskShared | BorrowMode::DiskExclusive, ItemState::Absent | ItemState::Reserved { .. })
                if !item.on_disk =>
            {
                return BorrowResult::IoPending;
            }
            (BorrowMode::DiskShared | BorrowMode::DiskExclusive, state) => state.slot(),
            (BorrowMode::Create, ItemState::Reserved { slot }) => Some(slot),
            (_, ItemState::Reserved { .. } | ItemState::Reading { .. }) => return BorrowResult::IoPending,
            (BorrowMode::Shared | BorrowMode::Exclusive, ItemState::Absent) if !item.on_disk => {
                return BorrowResult::IoPending;
            }
            (_, ItemState::Absent) => return BorrowResult::NeedsSlot,
            (_, ItemState::Clean { slot } | ItemState::Dirty { slot } | ItemState::Writing { slot, .. }) => Some(slot),
        };
        if mode == BorrowMode::Create
            && let ItemState::Reserved { slot } | ItemState::Clean { slot } = item.state
        {
            item.state = ItemState::Dirty { slot };
        }
        if mode.is_exclusive() {
            item.has_writer = true;
        } else {
            item.readers += 1;
        }
        if mode.needs_memory() {
            self.clock += 1;
            (item.last_use, item.prefetch_rank) = (self.clock, None);
            self.next_uses.record_use(&item.key);
        }
        BorrowResult::Borrowed(slot)
    }

    /// Ends a borrow; `is_dirty` if the item was changed in memory.
    pub(crate) fn release(&mut self, id: ItemId, mode: BorrowMode, is_dirty: bool) {
        let Some(item) = self.items.get_mut(&id) else { return };
        if mode.is_exclusive() {
            debug_assert!(item.has_writer, "{} was not borrowed", item.key);
            item.has_writer = false;
        } else {
            debug_assert!(item.readers > 0, "{} was not borrowed", item.key);
            item.readers -= 1;
        }
        if is_dirty {
            item.state = match item.state {
                ItemState::Clean { slot } => ItemState::Dirty { slot },
                ItemState::Writing { slot, .. } => ItemState::Writing { slot, changed: true },
                other => other,
            };
        }
        self.end_flush(id);
        self.reap(id);
    }

    /// Drops the copy in memory: the item was changed on disk.
    pub(crate) fn disk_changed(&mut self, id: ItemId) {
        let Some(item) = self.items.get_mut(&id) else { return };
        item.on_disk = true;
        if let Some(slot) = item.state.slot() {
            item.state = ItemState::Absent;
            self.slots.release(slot);
        }
    }

    /// Queues a thread that needs a slot, to read the item or to create it.
    pub(crate) fn enqueue_waiter(&mut self, id: ItemId, mode: BorrowMode) {
        // Each new waiter has failed transfers tried again once.
        self.items.values_mut().for_each(|item| item.write_failed = false);
        let Some(item) = self.items.get_mut(&id) else { return };
        item.read_failed = false;
        *item.waiters_mut(mode) += 1;
        self.waiters.push_back(id);
    }

    /// Removes a waiter from the queue.
    pub(crate) fn cancel_waiter(&mut self, id: ItemId, mode: BorrowMode) {
        let Some(item) = self.items.get_mut(&id) else { return };
        *item.waiters_mut(mode) -= 1;
        if let Some(index) = self.waiters.iter().position(|other| *other == id) {
            self.waiters.remove(index);
        }
        // A slot that no thread creates an item in is freed.
        if let (ItemState::Reserved { slot }, 0) = (item.state, item.create_waiters) {
            item.state = ItemState::Absent;
            self.slots.release(slot);
        }
        self.end_flush(id);
        self.reap(id);
    }

    /// Frees the key at once; the item is removed when its last borrow ends.
    pub(crate) fn delete(&mut self, id: ItemId) {
        let Some(item) = self.items.get_mut(&id).filter(|item| !item.is_deleted) else { return };
        item.is_deleted = true;
        self.keys.remove(&item.key);
        self.flushing.remove(&id);
        self.reap(id);
    }

    /// Whether deleted items will be removed as soon as their reads and writes complete.
    pub(crate) fn is_reaping(&self) -> bool {
        self.items.values().any(|item| item.is_deleted && item.is_idle() && item.is_in_flight())
    }

    /// Whether items were removed since the last [`take_reaped`](Self::take_reaped).
    pub(crate) fn has_reaped(&self) -> bool {
        !self.reaped.is_empty()
    }

    /// The items that were removed since the last call.
    pub(crate) fn take_reaped(&mut self) -> Vec<ItemId> {
        std::mem::take(&mut self.reaped)
    }

    /// Removes a deleted item that nothing uses any more.
    fn reap(&mut self, id: ItemId) {
        let Some(item) = self.items.get(&id) else { return };
        if !item.is_deleted || !item.is_idle() || item.is_in_flight() {
            return;
        }
        if let Some(slot) = item.state.slot() {
            self.slots.release(slot);
        }
        self.items.remove(&id);
        self.prefetches.retain(|other| *other != id);
        self.reaped.push(id);
    }

    /// Requests that an item is written back, unless the disk has its bytes.
    pub(crate) fn flush(&mut self, id: ItemId) -> Option<PendingFlush> {
        let item = self.items.get_mut(&id).filter(|item| !item.is_deleted && item.needs_flush())?;
        item.write_failed = false;
        self.flushing.insert(id);
        Some(PendingFlush { id, ended_before: item.flushes_ended })
    }

    /// Whether the disk has what the item was when its flush began. This stays true, whatever changes afterwards: a thread
    /// that waits for it may wake up late.
    pub(crate) fn is_flush_over(&self, flush: PendingFlush) -> bool {
        self.items.get(&flush.id).is_none_or(|item| item.is_deleted || item.flushes_ended > flush.ended_before)
    }

    /// Whether the disk lacks bytes of an item, deleted or not.
    pub(crate) fn needs_flush(&self, id: ItemId) -> bool {
        self.items.get(&id).is_some_and(Item::needs_flush)
    }

    /// Ends the flush of an item that has no more to write. Follows each transition that may end the need for it.
    fn end_flush(&mut self, id: ItemId) {
        if let Some(item) = self.items.get_mut(&id)
            && !item.needs_flush()
            && self.flushing.remove(&id)
        {
            item.flushes_ended += 1;
        }
    }

    /// Whether a waiter for a slot can go on: it has one, or will find an error.
    pub(crate) fn is_wait_over(&self, id: ItemId) -> bool {
        self.items.get(&id).is_none_or(|item| item.state != ItemState::Absent || item.read_failed || item.is_deleted)
    }

    /// Whether an item is borrowed exclusively.
    pub(crate) fn has_writer(&self, id: ItemId) -> bool {
        self.items.get(&id).is_some_and(|item| item.has_writer)
    }

    pub(crate) fn residence(&self, id: ItemId) -> Residence {
        match self.items.get(&id).map(|item| (item.state, item.on_disk)) {
            Some((ItemState::Absent, true)) => Residence::Disk,
            Some((ItemState::Clean { .. } | ItemState::Dirty { .. } | ItemState::Writing { .. }, _)) => {
                Residence::Memory
            }
            _ => Residence::Neither,
        }
    }

    /// Records the end of a read. `is_memory_back` is false if a failed read lost the slot's memory.
    pub(crate) fn read_completed(&mut self, id: ItemId, is_good: bool, is_memory_back: bool) {
        let Some(item) = self.items.get_mut(&id) else { return };
        let ItemState::Reading { slot } = item.state else { return };
        self.in_flight -= 1;
        if is_good {
            item.state = ItemState::Clean { slot };
        } else {
            (item.state, item.read_failed, item.prefetch_rank) = (ItemState::Absent, true, None);
            self.slots.release(slot);
            if !is_memory_back {
                self.slots.occupy(slot, item.slot_bytes, LOST);
            }
        }
        self.reap(id);
    }

    /// Records the end of a write.
    pub(crate) fn write_completed(&mut self, id: ItemId, is_good: bool) {
        let Some(item) = self.items.get_mut(&id) else { return };
        let ItemState::Writing { slot, changed } = item.state else { return };
        self.in_flight -= 1;
        (item.state, item.write_failed) = match (is_good, changed) {
            (true, false) => (ItemState::Clean { slot }, false),
            (true, true) => (ItemState::Dirty { slot }, false),
            (false, _) => (ItemState::Dirty { slot }, true),
        };
        item.on_disk |= is_good;
        // A flush tries once. A good write ends it, unless the item was changed meanwhile or is being changed.
        if !is_good {
            self.flushing.remove(&id);
        }
        self.end_flush(id);
        self.reap(id);
    }
}
