//! Items that can be evicted, sorted by their next use: all together, and by size.

use crate::next_use::{NextUse, NextUseQueue, Rank, UseOrder};
use crate::slot_allocator::ItemId;

/// Items of the new slot's own class that are tried. Some of them are smaller than the slot.
const TRIES_MAX: usize = 8;

/// A set of items and the bytes of their slots.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct VictimSet {
    all: UseOrder,
    /// By the number of bits of their bytes.
    by_class: Vec<UseOrder>,
}

impl Default for VictimSet {
    fn default() -> Self {
        let by_class = (0..=usize::BITS).map(|_| UseOrder::default()).collect();
        Self { all: UseOrder::default(), by_class }
    }
}

impl VictimSet {
    pub(super) fn insert(&mut self, next_use: NextUse, (id, bytes): (ItemId, usize)) {
        self.all.insert(next_use, id);
        self.by_class[class_of(bytes)].insert(next_use, id);
    }

    pub(super) fn remove(&mut self, next_use: NextUse, (id, bytes): (ItemId, usize)) {
        self.all.remove(next_use, id);
        self.by_class[class_of(bytes)].remove(next_use, id);
    }

    /// The items from the one used last to the one used next.
    pub(super) fn latest_first(&self, queue: &NextUseQueue) -> impl Iterator<Item = (Rank, ItemId)> {
        self.all.latest_first(queue)
    }

    /// Returns the item with the latest next use among those of at least `bytes`. Of the class that contains `bytes`,
    /// only the latest items are examined.
    pub(super) fn latest_of(
        &self,
        queue: &NextUseQueue,
        bytes: usize,
        bytes_of: impl Fn(ItemId) -> usize,
    ) -> Option<(Rank, ItemId)> {
        let class = class_of(bytes);
        let mut tried = self.by_class[class].latest_first(queue).take(TRIES_MAX);
        let same_class = tried.find(|(_, id)| bytes_of(*id) >= bytes);
        let larger = self.by_class[class + 1..].iter().filter_map(|order| order.latest_first(queue).next());
        same_class.into_iter().chain(larger).max()
    }
}

fn class_of(bytes: usize) -> usize {
    (usize::BITS - bytes.leading_zeros()) as usize
}
