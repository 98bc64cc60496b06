//! The next read or write, in order of priority: flushes, writes that a planned slot needs, slots for waiters,
//! prefetches, early write-back.
//!
//! Early write-back cleans the items that are needed last, so that the next reads find memory.

use super::eviction::EvictionPlan;
use super::item::ItemState;
use super::state::{Action, Residency};
use crate::slot_allocator::ItemId;

impl Residency {
    /// The next action; `None` until some state changes.
    pub(crate) fn next(&mut self) -> Option<Action> {
        let planned = self.next_flush().or_else(|| self.next_victim());
        planned.or_else(|| self.next_waiter()).or_else(|| self.next_early())
    }

    fn next_flush(&mut self) -> Option<Action> {
        let id = self.index.flushes.first().copied()?;
        self.start_write(id)
    }

    /// The rest of the items that have to be written before a slot is free.
    fn next_victim(&mut self) -> Option<Action> {
        while let Some(id) = self.write_backs.pop() {
            if self.items.get(&id).is_some_and(|item| item.is_evictable()) {
                let write = self.start_write(id);
                if write.is_some() {
                    return write;
                }
            }
        }
        None
    }

    /// A slot for the first waiter that can have one.
    fn next_waiter(&mut self) -> Option<Action> {
        // The shortest length that found no slot. Longer slots find none either.
        let mut shortest_failed = usize::MAX;
        let mut after = (0, 0);
        while let Some((ticket, id)) = self.index.lacking.range(after..).next().copied() {
            self.steps += 1;
            after = (ticket + 1, 0);
            let Some(item) = self.items.get(&id) else { continue };
            let (is_read, len) = (item.on_disk && item.waiters.for_bytes > 0, item.slot_bytes);
            if item.borrows.has_writer || len >= shortest_failed || !(is_read || item.waiters.for_new_slot > 0) {
                continue;
            }
            match self.plan_eviction(id, None) {
                EvictionPlan::Slot(slot) => return Some(self.assign_slot(id, slot, is_read)),
                EvictionPlan::AfterWriteBack(dirty) => return self.start_write(dirty),
                EvictionPlan::AfterWritesInFlight => {}
                EvictionPlan::NoVictims => shortest_failed = len,
            }
        }
        None
    }

    /// Prefetches and early write-back, unless a waiter still lacks a slot.
    fn next_early(&mut self) -> Option<Action> {
        if !self.index.lacking.is_empty() {
            return None;
        }
        self.update_window();
        if let Some((rank, id)) = self.index.missing.soonest(&self.next_uses) {
            match self.plan_eviction(id, Some(rank)) {
                EvictionPlan::Slot(slot) => return Some(self.assign_slot(id, slot, true)),
                EvictionPlan::AfterWriteBack(dirty) => return self.start_write(dirty),
                // Items further ahead are no more urgent.
                EvictionPlan::AfterWritesInFlight | EvictionPlan::NoVictims => {}
            }
        }
        let candidate = self.write_back_candidate()?;
        self.start_write(candidate)
    }

    /// The dirty item that is needed last, if less than the headroom is free or evictable.
    fn write_back_candidate(&self) -> Option<ItemId> {
        let headroom = self.slots.free_bytes() + self.index.spare_bytes;
        if headroom >= self.budgets.headroom_bytes {
            return None;
        }
        self.index.write_back.latest_first(&self.next_uses).next().map(|(_, id)| id)
    }

    fn assign_slot(&mut self, id: ItemId, slot: usize, is_read: bool) -> Action {
        let Some(item) = self.items.get_mut(&id) else { return Action::SlotReserved };
        self.slots.occupy(slot, item.slot_bytes, id);
        if is_read {
            self.in_flight += 1;
            item.state = ItemState::Reading { slot };
        } else {
            item.state = ItemState::Reserved { slot };
        }
        self.reindex(id);
        if is_read { Action::Read { id, slot } } else { Action::SlotReserved }
    }

    fn start_write(&mut self, id: ItemId) -> Option<Action> {
        let item = self.items.get_mut(&id)?;
        let ItemState::Dirty { slot } = item.state else { return None };
        self.in_flight += 1;
        item.state = ItemState::Writing { slot, changed: false };
        self.reindex(id);
        Some(Action::Write { id, slot })
    }
}
