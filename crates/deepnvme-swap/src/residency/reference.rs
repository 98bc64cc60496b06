//! The policy once more, as plain scans over all items: what `next` has to do, and what the index has to hold.

use std::collections::{BTreeSet, VecDeque};

use super::index::Index;
use super::item::ItemState;
use super::window::WINDOW_ITEMS_MAX;
use super::*;
use crate::slot_allocator::{ItemId, Span};

/// Prefetched items rank before everything else, then scheduled and unscheduled ones, then those whose last use is
/// over.
const SCHEDULED: u64 = 1 << 40;
const UNSCHEDULED: u64 = 1 << 60;
const OVER: u64 = 1 << 62;

/// The action that the policy requires next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Expected {
    Nothing,
    Write(ItemId),
    /// A slot for an item, to read it or to create it, instead of these items.
    Slot(ItemId, bool, BTreeSet<ItemId>),
}

enum Plan {
    Slot(BTreeSet<ItemId>),
    AfterWriteBack(ItemId),
    Later,
}

pub(super) fn next(residency: &Residency) -> Expected {
    let flushing = ids(residency).into_iter().find(|id| {
        let item = &residency.items[id];
        item.flush.is_requested && item.is_writable() && !item.failed.write
    });
    if let Some(id) = flushing {
        return Expected::Write(id);
    }
    let mut waiters: Vec<(u64, ItemId)> = Vec::new();
    for id in ids(residency) {
        waiters.extend(residency.items[&id].waiters.tickets.iter().map(|ticket| (*ticket, id)));
    }
    waiters.sort_unstable();
    for (_, id) in &waiters {
        let item = &residency.items[id];
        let is_read = item.on_disk && item.waiters.for_bytes > 0;
        let can_start = is_read || item.waiters.for_new_slot > 0;
        if item.state != ItemState::Absent || item.borrows.has_writer || item.failed.read || !can_start {
            continue;
        }
        match plan(residency, *id, None) {
            Plan::Slot(victims) => return Expected::Slot(*id, is_read, victims),
            Plan::AfterWriteBack(id) => return Expected::Write(id),
            Plan::Later => {}
        }
    }
    let lacks_slot = |id: &ItemId| residency.items[id].state == ItemState::Absent && !residency.items[id].failed.read;
    if waiters.iter().any(|(_, id)| lacks_slot(id)) {
        return Expected::Nothing;
    }
    let (window, missing) = window(residency);
    if let Some(id) = missing {
        match plan(residency, id, Some(next_use(residency, id))) {
            Plan::Slot(victims) => return Expected::Slot(id, true, victims),
            Plan::AfterWriteBack(id) => return Expected::Write(id),
            Plan::Later => {}
        }
    }
    write_back_candidate(residency, &window).map_or(Expected::Nothing, Expected::Write)
}

/// The items that are needed soon, and the first of them that is on disk only.
pub(super) fn window(residency: &Residency) -> (BTreeSet<ItemId>, Option<ItemId>) {
    let (mut window, mut missing, mut bytes) = (BTreeSet::new(), None, 0);
    let upcoming = residency.next_uses.upcoming();
    let upcoming = upcoming.iter().filter_map(|key| residency.keys.get(key)).map(|id| (*id, true));
    let prefetched = residency.window.prefetches().map(|id| (id, false));
    for (id, is_scheduled) in prefetched.chain(upcoming).take(WINDOW_ITEMS_MAX) {
        let item = &residency.items[&id];
        if item.borrows.has_writer || item.borrows.readers > 0 || window.contains(&id) {
            continue;
        }
        if is_scheduled {
            bytes += item.slot_bytes;
            if bytes > residency.budgets.prefetch_bytes && bytes > item.slot_bytes {
                break;
            }
        }
        window.insert(id);
        if missing.is_none() && item.state == ItemState::Absent && item.on_disk && !item.failed.read {
            missing = Some(id);
        }
    }
    (window, missing)
}

fn write_back_candidate(residency: &Residency, window: &BTreeSet<ItemId>) -> Option<ItemId> {
    let mut headroom = residency.slots.free_bytes();
    let mut latest = None;
    for id in ids(residency) {
        let item = &residency.items[&id];
        match item.state {
            ItemState::Writing { changed: false, .. } => headroom += item.slot_bytes,
            ItemState::Clean { .. } if item.is_idle() && !window.contains(&id) => headroom += item.slot_bytes,
            ItemState::Dirty { .. } if item.is_idle() && !item.failed.write && !window.contains(&id) => {
                latest = latest.max(Some((next_use(residency, id), id)));
            }
            _ => {}
        }
    }
    latest.filter(|_| headroom < residency.budgets.headroom_bytes).map(|(_, id)| id)
}

fn plan(residency: &Residency, id: ItemId, needed: Option<u64>) -> Plan {
    let len = residency.items[&id].slot_bytes;
    if residency.slots.spans_from(0).any(|span| span.owner.is_none() && span.len >= len) {
        return Plan::Slot(BTreeSet::new());
    }
    let next_use_of_victim = |other: ItemId, is_clean_only: bool| {
        let item = residency.items.get(&other)?;
        let is_evictable = match item.state {
            ItemState::Clean { .. } => true,
            ItemState::Dirty { .. } => !is_clean_only && !item.failed.write,
            ItemState::Writing { .. } => !is_clean_only,
            ItemState::Absent | ItemState::Reserved { .. } | ItemState::Reading { .. } => false,
        };
        let next_use = next_use(residency, other);
        (is_evictable && item.is_idle() && needed.is_none_or(|needed| next_use > needed)).then_some(next_use)
    };
    if let Some(victims) = find_victims(residency, len, |other| next_use_of_victim(other, true)) {
        return Plan::Slot(victims.into_iter().collect());
    }
    let Some(victims) = find_victims(residency, len, |other| next_use_of_victim(other, false)) else {
        return Plan::Later;
    };
    let is_dirty = |other: &ItemId| matches!(residency.items[other].state, ItemState::Dirty { .. });
    victims.into_iter().find(is_dirty).map_or(Plan::Later, Plan::AfterWriteBack)
}

/// The range whose soonest next use is farthest away; of equal ones, the smallest. `next_use_of` is `None` for items
/// that cannot be evicted.
pub(super) fn find_victims(
    residency: &Residency,
    len: usize,
    next_use_of: impl Fn(ItemId) -> Option<u64>,
) -> Option<Vec<ItemId>> {
    let mut best: Option<(u64, usize, Vec<ItemId>)> = None;
    let mut spans: VecDeque<(Span, u64)> = VecDeque::new();
    for span in residency.slots.spans_from(0) {
        let Some(next_use) = span.owner.map_or(Some(u64::MAX), &next_use_of) else {
            spans.clear();
            continue;
        };
        spans.push_back((span, next_use));
        let bytes = |spans: &VecDeque<(Span, u64)>| spans.iter().map(|(span, _)| span.len).sum::<usize>();
        while bytes(&spans) - spans[0].0.len >= len {
            spans.pop_front();
        }
        let (bytes, next_use) = (bytes(&spans), spans.iter().map(|(_, next_use)| *next_use).min()?);
        let is_better =
            |(best_next_use, best_bytes, _): &(u64, usize, _)| (next_use, *best_bytes) > (*best_next_use, bytes);
        if bytes >= len && best.as_ref().is_none_or(is_better) {
            best = Some((next_use, bytes, spans.iter().filter_map(|(span, _)| span.owner).collect()));
        }
    }
    best.map(|(_, _, victims)| victims)
}

/// When an item is used next; larger is later.
pub(super) fn next_use(residency: &Residency, id: ItemId) -> u64 {
    let item = &residency.items[&id];
    let (queue, age) = (&residency.next_uses, residency.clock - item.uses.last);
    let is_scheduled = !item.is_deleted && queue.find(&item.key).is_some();
    match (item.uses.prefetch_rank, queue.upcoming().iter().position(|key| *key == item.key)) {
        (Some(rank), _) => rank,
        (None, Some(distance)) if is_scheduled => SCHEDULED + distance as u64,
        (None, _) if is_scheduled => OVER + age,
        (None, _) => UNSCHEDULED + age,
    }
}

/// All sets, sums and gaps equal what a scan gives.
pub(super) fn check_index(residency: &Residency) {
    let mut entries = Vec::new();
    for id in ids(residency) {
        let item = &residency.items[&id];
        let next_use = residency.next_uses.next_use(item.uses.entry, item.uses.prefetch_rank, item.uses.last);
        let entry = item.index_entry_with(next_use);
        assert_eq!(item.index_entry, entry, "the index entry of {id} is stale: {item:?}");
        assert_eq!(item.waiters.tickets.len(), (item.waiters.for_bytes + item.waiters.for_new_slot) as usize);
        entries.push((id, entry));
    }
    assert_eq!(residency.index, Index::of(entries.iter().map(|(id, entry)| (*id, entry))));
    let (free, unpinned) = residency.slots.gaps();
    let owned: Vec<Span> = residency.slots.spans_from(0).collect();
    let gaps = |is_gap: &dyn Fn(&Span) -> bool| {
        let mut gaps: Vec<std::ops::Range<usize>> = Vec::new();
        for span in owned.iter().filter(|span| is_gap(span)) {
            match gaps.last_mut().filter(|last| last.end == span.start) {
                Some(last) => last.end += span.len,
                None => gaps.push(span.start..span.start + span.len),
            }
        }
        gaps
    };
    assert_eq!(free, gaps(&|span| span.owner.is_none()));
    let is_evictable = |id: ItemId| residency.items.get(&id).is_some_and(|item| item.is_evictable());
    assert_eq!(unpinned, gaps(&|span| span.owner.is_none_or(is_evictable)));
}

/// The window is what a scan gives, unless a waiter lacks a slot: then nothing asks for it.
pub(super) fn check_window(residency: &Residency) {
    if residency.index.lacking.is_empty() {
        let ahead = ids(residency).into_iter().filter(|id| residency.items[id].is_ahead()).collect();
        assert_eq!(window(residency).0, ahead, "the window of {residency:?}");
    }
}

fn ids(residency: &Residency) -> BTreeSet<ItemId> {
    residency.items.keys().copied().collect()
}
