//! The next read or write, in order of priority: flushes, slots for waiters, prefetches, early write-back.
//!
//! Early write-back cleans the items that are needed last, so that the next reads always find memory.

use std::collections::BTreeSet;

use super::eviction::EvictionPlan;
use super::item::ItemState;
use super::state::{Action, Residency};
use crate::slot_allocator::ItemId;

/// Upcoming items that are considered for prefetching.
const WINDOW_ITEMS_MAX: usize = 256;

impl Residency {
    /// The next action; `None` until some state changes.
    pub(crate) fn next(&mut self) -> Option<Action> {
        self.next_flush().or_else(|| self.next_waiter()).or_else(|| self.next_early())
    }

    fn next_flush(&mut self) -> Option<Action> {
        let items = &self.items;
        let is_ready = |id: &ItemId| items.get(id).is_some_and(|item| item.is_writable() && !item.write_failed);
        let id = self.flushing.iter().copied().find(is_ready)?;
        self.start_write(id)
    }

    /// A slot for the first waiter that can have one.
    fn next_waiter(&mut self) -> Option<Action> {
        for index in 0..self.waiters.len() {
            let id = self.waiters[index];
            let Some(item) = self.items.get(&id) else { continue };
            let is_read = item.on_disk && item.borrow_waiters > 0;
            if item.state != ItemState::Absent
                || item.has_writer
                || item.read_failed
                || !(is_read || item.create_waiters > 0)
            {
                continue;
            }
            match self.plan_eviction(id, None) {
                EvictionPlan::Slot(slot) => return Some(self.assign_slot(id, slot, is_read)),
                EvictionPlan::AfterWriteBack(dirty) => return self.start_write(dirty),
                EvictionPlan::AfterWritesInFlight | EvictionPlan::NoVictims => {}
            }
        }
        None
    }

    /// Prefetches and early write-back, unless a waiter still lacks a slot.
    fn next_early(&mut self) -> Option<Action> {
        let lacks_slot =
            |id: &ItemId| self.items.get(id).is_some_and(|item| item.state == ItemState::Absent && !item.read_failed);
        if self.waiters.iter().any(lacks_slot) {
            return None;
        }
        let (window, missing) = self.read_ahead_window();
        if let Some(id) = missing {
            match self.plan_eviction(id, Some(self.next_use(id))) {
                EvictionPlan::Slot(slot) => return Some(self.assign_slot(id, slot, true)),
                EvictionPlan::AfterWriteBack(dirty) => return self.start_write(dirty),
                // Items further ahead are no more urgent.
                EvictionPlan::AfterWritesInFlight | EvictionPlan::NoVictims => {}
            }
        }
        let candidate = self.write_back_candidate(&window)?;
        self.start_write(candidate)
    }

    /// The items that are needed soon, and the first of them that is on disk only.
    fn read_ahead_window(&mut self) -> (BTreeSet<ItemId>, Option<ItemId>) {
        let items = &self.items;
        self.prefetches.retain(|id| items.get(id).is_some_and(|item| item.prefetch_rank.is_some()));
        let (mut window, mut missing, mut bytes) = (BTreeSet::new(), None, 0);
        let prefetched = self.prefetches.iter().copied().map(|id| (id, false));
        let upcoming = self.next_uses.upcoming().filter_map(|key| self.keys.get(key)).map(|id| (*id, true));
        for (id, is_scheduled) in prefetched.chain(upcoming).take(WINDOW_ITEMS_MAX) {
            let Some(item) = self.items.get(&id) else { continue };
            if item.has_writer || item.readers > 0 || window.contains(&id) {
                continue;
            }
            if is_scheduled {
                bytes += item.slot_bytes;
                if bytes > self.budgets.prefetch_bytes && bytes > item.slot_bytes {
                    break;
                }
            }
            window.insert(id);
            if missing.is_none() && item.state == ItemState::Absent && item.on_disk && !item.read_failed {
                missing = Some(id);
            }
        }
        (window, missing)
    }

    /// The dirty item that is needed last, if less than the headroom is free or evictable.
    fn write_back_candidate(&self, window: &BTreeSet<ItemId>) -> Option<ItemId> {
        let mut headroom = self.slots.free_bytes();
        let mut latest: Option<(u64, ItemId)> = None;
        for id in self.slots.owners() {
            let Some(item) = self.items.get(&id) else { continue };
            match item.state {
                ItemState::Writing { changed: false, .. } => headroom += item.slot_bytes,
                ItemState::Clean { .. } if item.is_idle() && !window.contains(&id) => headroom += item.slot_bytes,
                ItemState::Dirty { .. } if item.is_idle() && !item.write_failed && !window.contains(&id) => {
                    latest = latest.max(Some((self.next_use(id), id)));
                }
                _ => {}
            }
            if headroom >= self.budgets.headroom_bytes {
                return None;
            }
        }
        latest.map(|(_, id)| id)
    }

    fn assign_slot(&mut self, id: ItemId, slot: usize, is_read: bool) -> Action {
        let Some(item) = self.items.get_mut(&id) else { return Action::SlotReserved };
        self.slots.occupy(slot, item.slot_bytes, id);
        if !is_read {
            item.state = ItemState::Reserved { slot };
            return Action::SlotReserved;
        }
        self.in_flight += 1;
        item.state = ItemState::Reading { slot };
        Action::Read { id, slot }
    }

    fn start_write(&mut self, id: ItemId) -> Option<Action> {
        let item = self.items.get_mut(&id)?;
        let ItemState::Dirty { slot } = item.state else { return None };
        self.in_flight += 1;
        item.state = ItemState::Writing { slot, changed: false };
        Some(Action::Write { id, slot })
    }
}
