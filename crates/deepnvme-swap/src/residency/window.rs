//! The extent of the read-ahead window: the items that are used next, which are read early and stay in memory.
//!
//! It has the first prefetches, then scheduled uses up to the prefetch budget. `read_ahead` moves it.

use std::collections::BTreeSet;

use crate::slot_allocator::ItemId;

/// Upcoming uses that are considered for prefetching.
pub(super) const WINDOW_ITEMS_MAX: usize = 256;

/// The extent of the window.
#[derive(Debug, Default)]
pub(super) struct ReadAheadWindow {
    /// All prefetches by rank.
    prefetches: BTreeSet<(u64, ItemId)>,
    /// The number of prefetches in the window, and the first rank behind them.
    prefetches_in: usize,
    rank_end: u64,
    next_rank: u64,
    /// The distance of the first scheduled use behind the window.
    pub(super) distance_end: usize,
    /// The number of scheduled uses in the window.
    pub(super) uses: usize,
}

impl ReadAheadWindow {
    /// Adds a prefetch, and returns its rank.
    pub(super) fn add_prefetch(&mut self, id: ItemId) -> u64 {
        let rank = self.next_rank;
        self.next_rank += 1;
        self.prefetches.insert((rank, id));
        rank
    }

    pub(super) fn remove_prefetch(&mut self, rank: u64, id: ItemId) {
        self.prefetches.remove(&(rank, id));
        // No prefetch joins the window before an earlier one.
        self.prefetches_in -= usize::from(rank < self.rank_end);
    }

    /// Takes the next prefetch into the window, if there is room.
    pub(super) fn take_prefetch(&mut self) -> Option<ItemId> {
        if self.prefetches_in == WINDOW_ITEMS_MAX {
            return None;
        }
        let (rank, id) = self.prefetches.range((self.rank_end, 0)..).next().copied()?;
        (self.rank_end, self.prefetches_in) = (rank + 1, self.prefetches_in + 1);
        Some(id)
    }

    /// How many scheduled uses have room in addition to the prefetches.
    pub(super) fn uses_max(&self) -> usize {
        WINDOW_ITEMS_MAX - self.prefetches_in
    }

    /// Forgets the scheduled part.
    pub(super) fn clear_uses(&mut self) {
        (self.distance_end, self.uses) = (0, 0);
    }

    /// The prefetched items in order.
    #[cfg(test)]
    pub(super) fn prefetches(&self) -> impl Iterator<Item = ItemId> {
        self.prefetches.iter().map(|(_, id)| *id)
    }
}
