//! Slots for items: free memory, or memory whose items are needed later than the new one.

use super::item::ItemState;
use super::state::Residency;
use super::victims::{VictimRange, VictimSearch};
use crate::next_use::Rank;
use crate::slot_allocator::{ItemId, Span};

/// How an item can get a slot.
pub(super) enum EvictionPlan {
    /// There is a slot at this offset; its former items have been evicted.
    Slot(usize),
    /// Once this item is written back.
    AfterWriteBack(ItemId),
    /// Once the writes in flight have completed.
    AfterWritesInFlight,
    /// Not before a borrow ends, or before an item that is used later can be evicted.
    NoVictims,
}

impl Residency {
    /// Finds a slot for an item. With `needed`, only items that are used later than that may be evicted; without it,
    /// any item that is not borrowed.
    pub(super) fn plan_eviction(&mut self, id: ItemId, needed: Option<Rank>) -> EvictionPlan {
        let Some(len) = self.items.get(&id).map(|item| item.slot_bytes) else { return EvictionPlan::NoVictims };
        if let Some(slot) = self.slots.find_gap(len) {
            return EvictionPlan::Slot(slot);
        }
        if self.slots.find_unpinned(len).is_none() {
            return EvictionPlan::NoVictims;
        }
        // Clean items can be evicted at once, even if dirty ones would be the better victims.
        let clean = self.find_victims(len, needed, true);
        let found = clean.or_else(|| self.find_victims(len, needed, false));
        let Some(range) = found.or_else(|| self.any_unpinned(len).filter(|_| needed.is_none())) else {
            return EvictionPlan::NoVictims;
        };
        let mut is_writing = false;
        for victim in range.victims.iter().rev() {
            match self.items.get(victim).map(|item| item.state) {
                // The next calls write the others, without another search.
                Some(ItemState::Dirty { .. }) => self.write_backs.push(*victim),
                Some(ItemState::Writing { .. }) => is_writing = true,
                _ => {}
            }
        }
        if let Some(dirty) = self.write_backs.pop() {
            return EvictionPlan::AfterWriteBack(dirty);
        }
        if is_writing {
            return EvictionPlan::AfterWritesInFlight;
        }
        for victim in range.victims {
            self.evict(victim);
        }
        EvictionPlan::Slot(range.start)
    }

    /// The range whose items are used last, of clean items only or of any.
    fn find_victims(&mut self, len: usize, needed: Option<Rank>, is_clean_only: bool) -> Option<VictimRange> {
        let (items, next_uses) = (&self.items, &self.next_uses);
        let rank_of = |id: ItemId| {
            let item = items.get(&id)?;
            let (next_use, sets) = item.index_entry.sorted?;
            if !sets.evictable || (is_clean_only && !matches!(item.state, ItemState::Clean { .. })) {
                return None;
            }
            let rank = next_uses.rank(next_use);
            needed.is_none_or(|needed| rank > needed).then_some(rank)
        };
        let set = if is_clean_only { &self.index.clean } else { &self.index.evictable };
        let is_later = |(rank, _): &(Rank, ItemId)| needed.is_none_or(|needed| *rank > needed);
        let slot_of = |(rank, id)| Some((rank, items.get(&id)?.state.slot()?));
        let bytes_of = |id: ItemId| items.get(&id).map_or(0, |item| item.slot_bytes);
        let single = set.latest_of(next_uses, len, bytes_of).filter(is_later).and_then(slot_of);
        let slots = set.latest_first(next_uses).take_while(is_later).filter_map(slot_of);
        let (slot_allocator, steps_max) = (&self.slots, self.search_steps_max);
        let mut search = VictimSearch { slots: slot_allocator, len, rank_of: &rank_of, steps_max, steps: 0 };
        let found = search.find(slots, single);
        self.steps += search.steps as u64;
        found
    }

    /// A range between two pinned slots. It exists as soon as there is room, but its items may be used soon.
    fn any_unpinned(&self, len: usize) -> Option<VictimRange> {
        let run = self.slots.find_unpinned(len)?;
        let (mut victims, mut bytes) = (Vec::new(), 0);
        let mut take = |span: Span| {
            bytes += span.len;
            victims.extend(span.owner);
            bytes < len
        };
        if self.slots.is_large(len) {
            self.slots.spans_from(run.start).all(&mut take);
            return Some(VictimRange { start: run.start, victims });
        }
        self.slots.spans_before(run.end).all(&mut take);
        Some(VictimRange { start: run.end - len, victims })
    }

    fn evict(&mut self, id: ItemId) {
        let Some(item) = self.items.get_mut(&id) else { return };
        if let ItemState::Clean { slot } = item.state {
            item.state = ItemState::Absent;
            self.slots.release(slot);
            self.evictions += 1;
            // An evicted prefetch is not repeated; the item is read again when it is borrowed.
            self.end_prefetch(id);
            self.reindex(id);
        }
    }
}
