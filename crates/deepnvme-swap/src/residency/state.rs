//! The items, and how each borrow, read and write changes their state.
//!
//! Each change of an item ends with `reindex`.

use std::collections::HashMap;
use std::sync::Arc;

use super::index::Index;
use super::item::{BorrowMode, Item, ItemState};
use super::victims::STEPS_MAX;
use super::window::ReadAheadWindow;
use crate::id_map::IdMap;
use crate::next_use::NextUseQueue;
use crate::slot_allocator::{ItemId, SlotAllocator};

/// The owner of slots whose memory was lost to an engine error.
const LOST: ItemId = ItemId::MAX;

/// A flush of an item that has begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PendingFlush {
    pub(crate) id: ItemId,
    /// The number of the item's flushes that had ended when it began.
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
pub(crate) enum ItemLocation {
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
    pub(super) items: IdMap<Item>,
    pub(super) keys: HashMap<Arc<str>, ItemId>,
    pub(super) slots: SlotAllocator,
    pub(super) budgets: Budgets,
    pub(super) next_uses: NextUseQueue,
    pub(super) index: Index,
    pub(super) window: ReadAheadWindow,
    /// Items to write next, the last one first, for a slot that was planned.
    pub(super) write_backs: Vec<ItemId>,
    /// Deleted items whose disk space can be freed.
    removed: Vec<ItemId>,
    next: NextNumbers,
    pub(super) clock: u64,
    pub(super) in_flight: usize,
    pub(crate) evictions: u64,
    /// Items, waiters and spans of memory that all decisions have examined.
    pub(super) steps: u64,
    /// Spans that a search for victims looks at before it settles for less.
    pub(super) search_steps_max: usize,
}

/// The next free numbers.
#[derive(Debug, Default)]
struct NextNumbers {
    id: ItemId,
    /// The place in the queue of the next thread that needs a slot.
    ticket: u64,
}

impl Residency {
    pub(crate) fn new(arena_bytes: usize, budgets: Budgets) -> Self {
        Self {
            items: IdMap::default(),
            keys: HashMap::new(),
            slots: SlotAllocator::new(arena_bytes),
            budgets,
            next_uses: NextUseQueue::default(),
            index: Index::default(),
            window: ReadAheadWindow::default(),
            write_backs: Vec::new(),
            removed: Vec::new(),
            next: NextNumbers::default(),
            clock: 0,
            in_flight: 0,
            evictions: 0,
            steps: 0,
            search_steps_max: STEPS_MAX,
        }
    }

    /// Adds an item, which is on disk already or will be created in memory. The key must be free.
    pub(crate) fn add(&mut self, key: &Arc<str>, slot_bytes: usize, on_disk: bool) -> ItemId {
        let id = self.next.id;
        self.next.id += 1;
        let before = self.keys.insert(Arc::clone(key), id);
        debug_assert!(before.is_none(), "{key} exists already");
        // No two items have the same last use, so that their order is certain.
        self.clock += 1;
        self.items.insert(id, Item::new(key, slot_bytes, on_disk, self.clock));
        if let Some(entry) = self.next_uses.find(key) {
            self.attach_entry(id, entry);
        }
        self.reindex(id);
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
        self.window.clear_uses();
        let before: Vec<ItemId> = self.next_uses.items().collect();
        for id in before {
            if let Some(item) = self.items.get_mut(&id) {
                (item.uses.entry, item.uses.ahead) = (None, 0);
            }
        }
        self.next_uses = order;
        let item_of = |(entry, key): (usize, &Arc<str>)| self.keys.get(key).map(|id| (entry, *id));
        let scheduled: Vec<(usize, ItemId)> = self.next_uses.keys().filter_map(item_of).collect();
        scheduled.into_iter().for_each(|(entry, id)| self.attach_entry(id, entry));
        let all: Vec<ItemId> = self.items.keys().copied().collect();
        all.into_iter().for_each(|id| self.reindex(id));
    }

    /// Borrows an item, if that is possible now.
    pub(crate) fn try_borrow(&mut self, id: ItemId, mode: BorrowMode) -> BorrowResult {
        let Some(item) = self.items.get_mut(&id).filter(|item| !item.is_deleted) else { return BorrowResult::Deleted };
        if item.borrows.has_writer || (mode.is_exclusive() && item.borrows.readers > 0) {
            return BorrowResult::HeldByOthers;
        }
        // Threads that keep changing an item must not keep a flush from writing it.
        if matches!(mode, BorrowMode::Exclusive | BorrowMode::Create)
            && matches!(item.state, ItemState::Dirty { .. } | ItemState::Writing { .. })
            && item.flush.is_requested
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
            item.borrows.has_writer = true;
        } else {
            item.borrows.readers += 1;
        }
        if mode.needs_memory() {
            self.clock += 1;
            item.uses.last = self.clock;
            self.end_prefetch(id);
            self.record_use(id);
        }
        self.reindex(id);
        BorrowResult::Borrowed(slot)
    }

    /// Ends a borrow; `is_dirty` if the item was changed in memory.
    pub(crate) fn release(&mut self, id: ItemId, mode: BorrowMode, is_dirty: bool) {
        let Some(item) = self.items.get_mut(&id) else { return };
        if mode.is_exclusive() {
            debug_assert!(item.borrows.has_writer, "{} was not borrowed", item.key);
            item.borrows.has_writer = false;
        } else {
            debug_assert!(item.borrows.readers > 0, "{} was not borrowed", item.key);
            item.borrows.readers -= 1;
        }
        if is_dirty {
            item.state = match item.state {
                ItemState::Clean { slot } => ItemState::Dirty { slot },
                ItemState::Writing { slot, .. } => ItemState::Writing { slot, changed: true },
                other => other,
            };
        }
        self.end_flush_and_remove(id);
    }

    /// Drops the copy in memory: the item was changed on disk.
    pub(crate) fn disk_changed(&mut self, id: ItemId) {
        let Some(item) = self.items.get_mut(&id) else { return };
        item.on_disk = true;
        if let Some(slot) = item.state.slot() {
            item.state = ItemState::Absent;
            self.slots.release(slot);
        }
        self.reindex(id);
    }

    /// Queues a thread that needs a slot, to read the item or to create it.
    pub(crate) fn enqueue_waiter(&mut self, id: ItemId, mode: BorrowMode) {
        // Each new waiter has failed transfers tried again once.
        while let Some(failed) = self.index.write_failed.first().copied() {
            if let Some(item) = self.items.get_mut(&failed) {
                item.failed.write = false;
            }
            self.reindex(failed);
        }
        let Some(item) = self.items.get_mut(&id) else { return };
        item.failed.read = false;
        *item.waiters_mut(mode) += 1;
        item.waiters.tickets.push_back(self.next.ticket);
        self.next.ticket += 1;
        self.reindex(id);
    }

    /// Removes a waiter from the queue.
    pub(crate) fn cancel_waiter(&mut self, id: ItemId, mode: BorrowMode) {
        let Some(item) = self.items.get_mut(&id) else { return };
        *item.waiters_mut(mode) -= 1;
        item.waiters.tickets.pop_front();
        // A slot that no thread creates an item in is freed.
        if let (ItemState::Reserved { slot }, 0) = (item.state, item.waiters.for_new_slot) {
            item.state = ItemState::Absent;
            self.slots.release(slot);
        }
        self.end_flush_and_remove(id);
    }

    /// Frees the key at once; the item is removed when its last borrow ends.
    pub(crate) fn delete(&mut self, id: ItemId) {
        let Some(item) = self.items.get_mut(&id).filter(|item| !item.is_deleted) else { return };
        (item.is_deleted, item.flush.is_requested) = (true, false);
        self.keys.remove(&item.key);
        self.detach_entry(id);
        self.end_flush_and_remove(id);
    }

    /// Whether deleted items will be removed as soon as their reads and writes complete.
    pub(crate) fn is_removing(&self) -> bool {
        self.index.removing > 0
    }

    /// Whether items were removed since the last [`take_removed`](Self::take_removed).
    pub(crate) fn has_removed(&self) -> bool {
        !self.removed.is_empty()
    }

    /// The items that were removed since the last call.
    pub(crate) fn take_removed(&mut self) -> Vec<ItemId> {
        std::mem::take(&mut self.removed)
    }

    /// Removes a deleted item that nothing uses any more.
    fn remove_deleted(&mut self, id: ItemId) {
        let Some(item) = self.items.get(&id) else { return };
        if !item.is_deleted || !item.is_idle() || item.is_in_flight() {
            return;
        }
        if let Some(slot) = item.state.slot() {
            self.slots.release(slot);
        }
        self.end_prefetch(id);
        self.remove_from_index(id);
        self.items.remove(&id);
        self.removed.push(id);
    }

    /// Requests that an item is written back, unless the disk has its bytes.
    pub(crate) fn flush(&mut self, id: ItemId) -> Option<PendingFlush> {
        let item = self.items.get_mut(&id).filter(|item| !item.is_deleted && item.needs_flush())?;
        (item.failed.write, item.flush.is_requested) = (false, true);
        let ended_before = item.flush.ended;
        self.reindex(id);
        Some(PendingFlush { id, ended_before })
    }

    /// Whether the disk has what the item was when its flush began, or the item is deleted. This stays true, whatever
    /// changes afterwards: a thread that waits for it may wake up late.
    pub(crate) fn is_flush_over(&self, flush: PendingFlush) -> bool {
        self.items.get(&flush.id).is_none_or(|item| item.is_deleted || item.flush.ended > flush.ended_before)
    }

    /// Whether the disk lacks bytes of an item, deleted or not.
    pub(crate) fn needs_flush(&self, id: ItemId) -> bool {
        self.items.get(&id).is_some_and(Item::needs_flush)
    }

    /// Ends the flush of an item if it has no more to write, and removes the item if it is deleted and nothing uses it.
    /// Each transition that can lead to either ends with this.
    fn end_flush_and_remove(&mut self, id: ItemId) {
        if let Some(item) = self.items.get_mut(&id)
            && !item.needs_flush()
            && std::mem::take(&mut item.flush.is_requested)
        {
            item.flush.ended += 1;
        }
        self.reindex(id);
        self.remove_deleted(id);
    }

    /// Whether a waiter for a slot can go on: it has one, or will find an error.
    pub(crate) fn is_wait_over(&self, id: ItemId) -> bool {
        self.items.get(&id).is_none_or(|item| item.state != ItemState::Absent || item.failed.read || item.is_deleted)
    }

    /// Whether an item is borrowed exclusively.
    pub(crate) fn has_writer(&self, id: ItemId) -> bool {
        self.items.get(&id).is_some_and(|item| item.borrows.has_writer)
    }

    pub(crate) fn location(&self, id: ItemId) -> ItemLocation {
        match self.items.get(&id).map(|item| (item.state, item.on_disk)) {
            Some((ItemState::Absent, true)) => ItemLocation::Disk,
            Some((ItemState::Clean { .. } | ItemState::Dirty { .. } | ItemState::Writing { .. }, _)) => {
                ItemLocation::Memory
            }
            _ => ItemLocation::Neither,
        }
    }

    /// Records the end of a read. `is_memory_back` is false if a failed read lost the slot's memory.
    pub(crate) fn read_completed(&mut self, id: ItemId, is_good: bool, is_memory_back: bool) {
        let Some(item) = self.items.get_mut(&id) else { return };
        let ItemState::Reading { slot } = item.state else { return };
        self.in_flight -= 1;
        let len = item.slot_bytes;
        if is_good {
            item.state = ItemState::Clean { slot };
        } else {
            (item.state, item.failed.read) = (ItemState::Absent, true);
            self.slots.release(slot);
            self.end_prefetch(id);
        }
        self.reindex(id);
        if !is_good && !is_memory_back {
            self.slots.occupy(slot, len, LOST);
            self.slots.pin(slot..slot + len);
        }
        self.remove_deleted(id);
    }

    /// Records the end of a write.
    pub(crate) fn write_completed(&mut self, id: ItemId, is_good: bool) {
        let Some(item) = self.items.get_mut(&id) else { return };
        let ItemState::Writing { slot, changed } = item.state else { return };
        self.in_flight -= 1;
        (item.state, item.failed.write) = match (is_good, changed) {
            (true, false) => (ItemState::Clean { slot }, false),
            (true, true) => (ItemState::Dirty { slot }, false),
            (false, _) => (ItemState::Dirty { slot }, true),
        };
        item.on_disk |= is_good;
        // A flush tries once. A good write ends it, unless the item was changed meanwhile or is being changed.
        item.flush.is_requested &= is_good;
        self.end_flush_and_remove(id);
    }
}
