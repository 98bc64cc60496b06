//! Slots for items: free memory, or memory whose items are needed later than the new one.

use super::item::ItemState;
use super::state::Residency;
use crate::slot_allocator::ItemId;

/// How an item can get a slot.
pub(super) enum EvictionPlan {
    /// There is a slot at this offset; its former items have been evicted.
    Slot(usize),
    /// Once this item is written back.
    AfterWriteBack(ItemId),
    /// Once the writes in flight have completed.
    AfterWritesInFlight,
    /// Not before a borrow ends.
    NoVictims,
}

impl Residency {
    /// Finds a slot for an item. With `needed`, only items that are used later than that may be evicted; without it, any
    /// item that is not borrowed.
    pub(super) fn plan_eviction(&mut self, id: ItemId, needed: Option<u64>) -> EvictionPlan {
        let len = self.items[&id].slot_bytes;
        if let Some(slot) = self.slots.find_gap(len) {
            return EvictionPlan::Slot(slot);
        }
        let next_use_of_victim = |other: ItemId, is_clean_only: bool| {
            let item = self.items.get(&other)?;
            let is_evictable = match item.state {
                ItemState::Clean { .. } => true,
                ItemState::Dirty { .. } => !is_clean_only && !item.write_failed,
                ItemState::Writing { .. } => !is_clean_only,
                ItemState::Absent | ItemState::Reserved { .. } | ItemState::Reading { .. } => false,
            };
            let next_use = self.next_use(other);
            (is_evictable && item.is_idle() && needed.is_none_or(|needed| next_use > needed)).then_some(next_use)
        };
        // Clean items can be evicted at once, even if dirty ones would be the better victims.
        if let Some(range) = self.slots.find_victims(len, |other| next_use_of_victim(other, true)) {
            for victim in range.victims {
                self.evict(victim);
            }
            return EvictionPlan::Slot(range.start);
        }
        let Some(range) = self.slots.find_victims(len, |other| next_use_of_victim(other, false)) else {
            return EvictionPlan::NoVictims;
        };
        let is_dirty = |other: &ItemId| matches!(self.items[other].state, ItemState::Dirty { .. });
        let dirty = range.victims.iter().copied().find(is_dirty);
        dirty.map_or(EvictionPlan::AfterWritesInFlight, EvictionPlan::AfterWriteBack)
    }

    fn evict(&mut self, id: ItemId) {
        let Some(item) = self.items.get_mut(&id) else { return };
        if let ItemState::Clean { slot } = item.state {
            item.state = ItemState::Absent;
            // An evicted prefetch is not repeated; the item is read again when it is borrowed.
            item.prefetch_rank = None;
            self.slots.release(slot);
            self.evictions += 1;
        }
    }

    /// When an item is used next; larger is later.
    pub(super) fn next_use(&self, id: ItemId) -> u64 {
        self.items.get(&id).map_or(0, |item| {
            let age = self.clock - item.last_use;
            self.next_uses.next_use(&item.key, item.prefetch_rank, age)
        })
    }
}
