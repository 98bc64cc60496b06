//! Keeps the index up to date with the items.

use super::index::Filing;
use super::state::Residency;
use crate::slot_allocator::ItemId;

impl Residency {
    /// Brings the index up to date after a change of an item.
    pub(super) fn refile(&mut self, id: ItemId) {
        self.steps += 1;
        let Some(item) = self.items.get_mut(&id) else { return };
        let next_use = self.next_uses.next_use(item.uses.entry, item.uses.prefetch_rank, item.uses.last);
        let filing = item.filing_with(next_use);
        let before = std::mem::replace(&mut item.filing, filing);
        self.replace_filing(id, &before, &filing);
    }

    /// Takes an item out of the index.
    pub(super) fn unfile(&mut self, id: ItemId) {
        let Some(item) = self.items.get_mut(&id) else { return };
        let before = std::mem::take(&mut item.filing);
        self.replace_filing(id, &before, &Filing::default());
    }

    fn replace_filing(&mut self, id: ItemId, before: &Filing, after: &Filing) {
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
