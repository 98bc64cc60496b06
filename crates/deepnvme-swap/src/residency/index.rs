//! Sets and sums over all items, so that no decision has to look at each of them.
//!
//! [`IndexEntry`] says how an item counts. It follows from the item and its next use. After each change of an item,
//! `reindex` replaces its old entry by the new one.

use std::collections::BTreeSet;
use std::ops::Range;

use super::victim_set::VictimSet;
use crate::next_use::{NextUse, UseOrder};
use crate::slot_allocator::ItemId;

/// How an item counts in the index. The default does not count at all.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct IndexEntry {
    /// Its key in the sorted sets, and those that it is in; only of items that are in one.
    pub(super) sorted: Option<(NextUse, SortedSets)>,
    pub(super) is_flush: bool,
    pub(super) write_failed: bool,
    pub(super) is_removing: bool,
    /// Its place in the queue if a waiter for it lacks a slot.
    pub(super) ticket: Option<u64>,
    /// Its slot, if that is pinned.
    pub(super) pin: Option<(usize, usize)>,
    pub(super) spare_bytes: usize,
    /// Its bytes if the prefetch budget counts them.
    pub(super) window_bytes: usize,
    pub(super) slot_bytes: usize,
}

/// The sets, sorted by next use, that an item is in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SortedSets {
    pub(super) clean: bool,
    pub(super) evictable: bool,
    pub(super) write_back: bool,
    pub(super) missing: bool,
}

impl SortedSets {
    pub(super) fn is_empty(self) -> bool {
        !(self.clean || self.evictable || self.write_back || self.missing)
    }
}

impl IndexEntry {
    pub(super) fn pin(&self) -> Option<Range<usize>> {
        self.pin.map(|(start, len)| start..start + len)
    }
}

/// Facts about all items together, for the decisions.
#[derive(PartialEq, Eq, Debug, Default)]
pub(super) struct Index {
    /// Items that can be evicted at once.
    pub(super) clean: VictimSet,
    /// Those, and items that can be evicted once they are written.
    pub(super) evictable: VictimSet,
    /// Items for early write-back.
    pub(super) write_back: UseOrder,
    /// Items of the read-ahead window that are on disk only.
    pub(super) missing: UseOrder,
    /// Items that a flush has requested and that can be written now.
    pub(super) flushes: BTreeSet<ItemId>,
    pub(super) write_failed: BTreeSet<ItemId>,
    /// Items that waiters lack a slot for, in order of arrival.
    pub(super) lacking: BTreeSet<(u64, ItemId)>,
    /// Deleted items that will be removed as soon as their reads and writes complete.
    pub(super) removing: usize,
    /// Bytes of items that can be evicted at once and are not needed soon, or that will be on disk soon.
    pub(super) spare_bytes: usize,
    /// Bytes and number of the scheduled items in the read-ahead window.
    pub(super) window_bytes: usize,
    pub(super) window_items: usize,
}

impl Index {
    /// The index of these items, from nothing.
    #[cfg(test)]
    pub(super) fn of<'a>(entries: impl Iterator<Item = (ItemId, &'a IndexEntry)>) -> Self {
        let mut index = Self::default();
        entries.for_each(|(id, entry)| index.insert(id, entry));
        index
    }

    pub(super) fn insert(&mut self, id: ItemId, entry: &IndexEntry) {
        self.change(id, entry, Change::Insert);
    }

    pub(super) fn remove(&mut self, id: ItemId, entry: &IndexEntry) {
        self.change(id, entry, Change::Remove);
    }

    fn change(&mut self, id: ItemId, entry: &IndexEntry, change: Change) {
        if let Some((next_use, sets)) = entry.sorted {
            for (set, is_member) in [(&mut self.clean, sets.clean), (&mut self.evictable, sets.evictable)] {
                match change {
                    Change::Insert if is_member => set.insert(next_use, (id, entry.slot_bytes)),
                    Change::Remove if is_member => set.remove(next_use, (id, entry.slot_bytes)),
                    _ => {}
                }
            }
            for (order, is_member) in [(&mut self.write_back, sets.write_back), (&mut self.missing, sets.missing)] {
                match change {
                    Change::Insert if is_member => order.insert(next_use, id),
                    Change::Remove if is_member => order.remove(next_use, id),
                    _ => {}
                }
            }
        }
        change.member(&mut self.flushes, entry.is_flush.then_some(id));
        change.member(&mut self.write_failed, entry.write_failed.then_some(id));
        change.member(&mut self.lacking, entry.ticket.map(|ticket| (ticket, id)));
        change.sum(&mut self.removing, usize::from(entry.is_removing));
        change.sum(&mut self.spare_bytes, entry.spare_bytes);
        change.sum(&mut self.window_bytes, entry.window_bytes);
        change.sum(&mut self.window_items, usize::from(entry.window_bytes > 0));
    }
}

/// The change of an item's share of each set and sum.
#[derive(Clone, Copy)]
enum Change {
    Insert,
    Remove,
}

impl Change {
    fn member<T: Ord>(self, set: &mut BTreeSet<T>, member: Option<T>) {
        match (self, member) {
            (Self::Insert, Some(member)) => drop(set.insert(member)),
            (Self::Remove, Some(member)) => drop(set.remove(&member)),
            (_, None) => {}
        }
    }

    fn sum(self, sum: &mut usize, part: usize) {
        match self {
            Self::Insert => *sum += part,
            Self::Remove => *sum -= part,
        }
    }
}
