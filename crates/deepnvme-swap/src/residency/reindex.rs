//! Keeps the index up to date with the items.

use super::index::IndexEntry;
use super::state::Residency;
use crate::slot_allocator::ItemId;

impl Residency {
    /// Brings the index up to date after a change of an item.
    pub(super) fn reindex(&mut self, id: ItemId) {
        self.steps += 1;
        let Some(item) = self.items.get_mut(&id) else { return };
        let next_use = self.next_uses.next_use(item.uses.entry, item.uses.prefetch_rank, item.uses.last);
        let entry = item.index_entry_with(next_use);
        let before = std::mem::replace(&mut item.index_entry, entry);
        self.replace_index_entry(id, &before, &entry);
    }

    /// Removes an item from the index.
    pub(super) fn remove_from_index(&mut self, id: ItemId) {
        let Some(item) = self.items.get_mut(&id) else { return };
        let before = std::mem::take(&mut item.index_entry);
        self.replace_index_entry(id, &before, &IndexEntry::default());
    }

    fn replace_index_entry(&mut self, id: ItemId, before: &IndexEntry, after: &IndexEntry) {
        if before == after {
            return;
        }
        self.index.remove(id, before);
        self.index.insert(id, after);
        if before.pin != after.pin {
            before.pin().into_iter().for_each(|slot| self.slots.unpin(slot));
            after.pin().into_iter().for_each(|slot| self.slots.pin(slot));
        }
    }
}
