//! Moves the read-ahead window with the schedule: uses leave it at the front and join it at the end.

use super::state::Residency;
use crate::slot_allocator::ItemId;

impl Residency {
    /// Requests that an item is read before it is borrowed.
    pub(crate) fn prefetch(&mut self, id: ItemId) {
        let Some(item) = self.items.get_mut(&id).filter(|item| !item.is_deleted) else { return };
        item.failed.read = false;
        if item.uses.prefetch_rank.is_none() {
            item.uses.prefetch_rank = Some(self.window.add_prefetch(id));
        }
        self.reindex(id);
    }

    /// Ends a prefetch. The caller reindexes the item.
    pub(super) fn end_prefetch(&mut self, id: ItemId) {
        let Some(item) = self.items.get_mut(&id) else { return };
        if let Some(rank) = item.uses.prefetch_rank.take() {
            item.uses.is_prefetch_in_window = false;
            self.window.remove_prefetch(rank, id);
        }
    }

    /// Moves the schedule on when an item is used. The caller reindexes that item.
    pub(super) fn record_use(&mut self, id: ItemId) {
        let entry = self.items.get(&id).and_then(|item| item.uses.entry);
        let Some(distance) = entry.and_then(|entry| self.next_uses.advance_of(entry)) else { return };
        let end = self.window.distance_end;
        let mut left = self.next_uses.next_with_item(0);
        while let Some((at, position)) = left.filter(|(at, _)| *at <= distance && *at < end) {
            self.remove_use(position);
            left = self.next_uses.next_with_item(at + 1);
        }
        self.window.distance_end = end.saturating_sub(distance + 1);
        for changed in self.next_uses.advance(distance) {
            self.reindex(changed);
        }
    }

    /// Attaches an item to its entry of the schedule.
    pub(super) fn attach_entry(&mut self, id: ItemId, entry: usize) {
        self.next_uses.set_item(entry, Some(id));
        let end = self.window.distance_end;
        let uses = self.next_uses.distances(entry).filter(|distance| *distance < end).count();
        self.window.uses += uses;
        if let Some(item) = self.items.get_mut(&id) {
            (item.uses.entry, item.uses.ahead) = (Some(entry), uses as u32);
        }
    }

    /// Detaches an item from its entry of the schedule. The caller reindexes it.
    pub(super) fn detach_entry(&mut self, id: ItemId) {
        let Some(item) = self.items.get_mut(&id) else { return };
        if let Some(entry) = item.uses.entry.take() {
            self.window.uses -= std::mem::take(&mut item.uses.ahead) as usize;
            self.next_uses.set_item(entry, None);
        }
    }

    /// Makes the window what prefetches, schedule and budget ask for.
    pub(super) fn update_window(&mut self) {
        loop {
            self.add_prefetches();
            let uses_max = self.window.uses_max();
            let (bytes, items) = (self.index.window_bytes, self.index.window_items);
            // A single item may exceed the budget.
            if self.window.uses > uses_max || (bytes > self.budgets.prefetch_bytes && items > 1) {
                self.remove_last_use();
            } else if self.window.uses == uses_max || !self.add_next_use() {
                return;
            }
        }
    }

    fn add_prefetches(&mut self) {
        while let Some(id) = self.window.take_prefetch() {
            if let Some(item) = self.items.get_mut(&id) {
                item.uses.is_prefetch_in_window = true;
            }
            self.reindex(id);
        }
    }

    /// Takes the next scheduled use into the window. Returns whether there is one that the budget allows.
    fn add_next_use(&mut self) -> bool {
        let Some((distance, position)) = self.next_uses.next_with_item(self.window.distance_end) else { return false };
        let Some(id) = self.next_uses.item_at(position) else { return false };
        let Some(item) = self.items.get_mut(&id) else { return false };
        let bytes = self.index.window_bytes;
        // Borrowed items and those that are in the window already cost nothing.
        let is_free = item.is_borrowed() || item.is_ahead();
        if !is_free && bytes > 0 && bytes + item.slot_bytes > self.budgets.prefetch_bytes {
            return false;
        }
        item.uses.ahead += 1;
        self.window.uses += 1;
        self.window.distance_end = distance + 1;
        self.reindex(id);
        true
    }

    fn remove_last_use(&mut self) {
        let last = self.next_uses.last_with_item(self.window.distance_end);
        debug_assert!(last.is_some(), "the window has uses of no item");
        let Some((distance, position)) = last else { return self.window.clear_uses() };
        self.window.distance_end = distance;
        self.remove_use(position);
    }

    fn remove_use(&mut self, position: usize) {
        let Some(id) = self.next_uses.item_at(position) else { return };
        let Some(item) = self.items.get_mut(&id) else { return };
        item.uses.ahead -= 1;
        self.window.uses -= 1;
        self.reindex(id);
    }
}
