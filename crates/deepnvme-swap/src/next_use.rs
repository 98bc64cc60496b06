//! When each item is used next. This module does no I/O.
//!
//! The caller's schedule gives exact positions, and prefetched items come before it. For all other items only the past
//! is known, so the most recently used one is expected first.
//!
//! An item's [`NextUse`] changes only when the item is used or prefetched, or when the schedule passes one of its uses.
//! So it can be a key of sorted sets. A schedule that repeats is a circle: its positions stay, and the point where it
//! begins moves ([`Rank`]).

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::ops::Bound;
use std::sync::Arc;

use crate::slot_allocator::ItemId;

/// The next use of an item, sooner ones first if the schedule is at its beginning.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum NextUse {
    /// Its place among the prefetches.
    Prefetched(u64),
    /// A position of the schedule.
    Scheduled(usize),
    /// Not scheduled; the clock at its last use.
    Unscheduled(Reverse<u64>),
    /// Its last scheduled use is over; the clock at that use.
    Over(Reverse<u64>),
}

/// A next use as seen from the present position: the position has become a distance. Smaller is sooner.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Rank(NextUse);

/// The order in which items are used.
#[derive(Debug, Default)]
pub(crate) struct NextUseQueue {
    /// The entry at each position.
    order: Vec<usize>,
    entries: Vec<ScheduledKey>,
    entry_of: HashMap<Arc<str>, usize>,
    /// The positions of entries that have several.
    repeated: Vec<usize>,
    /// The positions whose key has an item.
    with_item: BTreeSet<usize>,
    repeats: bool,
    /// The position that is expected next.
    at: usize,
}

/// A key of the schedule.
#[derive(Debug)]
struct ScheduledKey {
    key: Arc<str>,
    /// Ascending.
    positions: Vec<usize>,
    item: Option<ItemId>,
}

impl NextUseQueue {
    /// Starts at the beginning of `keys`; if it `repeats`, again after its end.
    pub(crate) fn new(keys: Vec<Arc<str>>, repeats: bool) -> Self {
        let mut queue = Self { order: Vec::with_capacity(keys.len()), repeats, ..Self::default() };
        for (position, key) in keys.into_iter().enumerate() {
            let entry = *queue.entry_of.entry(key).or_insert_with_key(|key| {
                queue.entries.push(ScheduledKey { key: Arc::clone(key), positions: Vec::new(), item: None });
                queue.entries.len() - 1
            });
            queue.entries[entry].positions.push(position);
            queue.order.push(entry);
        }
        let is_repeated = |position: &usize| queue.entries[queue.order[*position]].positions.len() > 1;
        queue.repeated = (0..queue.order.len()).filter(is_repeated).collect();
        queue
    }

    /// The entry of a key.
    pub(crate) fn find(&self, key: &str) -> Option<usize> {
        self.entry_of.get(key).copied()
    }

    /// All keys with their entries.
    pub(crate) fn keys(&self) -> impl Iterator<Item = (usize, &Arc<str>)> {
        self.entries.iter().map(|entry| &entry.key).enumerate()
    }

    /// All items that are attached to an entry.
    pub(crate) fn items(&self) -> impl Iterator<Item = ItemId> {
        self.entries.iter().filter_map(|entry| entry.item)
    }

    /// Records the item of an entry, or that there is none.
    pub(crate) fn set_item(&mut self, entry: usize, item: Option<ItemId>) {
        let ScheduledKey { positions, item: before, .. } = &mut self.entries[entry];
        *before = item;
        if item.is_some() {
            self.with_item.extend(positions.iter());
        } else {
            for position in positions.iter() {
                self.with_item.remove(position);
            }
        }
    }

    /// The item at a position.
    pub(crate) fn item_at(&self, position: usize) -> Option<ItemId> {
        self.entries[self.order[position]].item
    }

    /// The distances of all uses of an entry, in this round.
    pub(crate) fn distances(&self, entry: usize) -> impl Iterator<Item = usize> {
        self.entries[entry].positions.iter().filter_map(|position| self.distance_to(*position))
    }

    /// The number of other uses before a position; `None` if it is past.
    fn distance_to(&self, position: usize) -> Option<usize> {
        match position.checked_sub(self.at) {
            Some(distance) => Some(distance),
            None if self.repeats => Some(position + self.order.len() - self.at),
            None => None,
        }
    }

    /// The number of other uses before this entry's next one, if it moves the schedule on: uses far ahead are out of
    /// order.
    pub(crate) fn advance_of(&self, entry: usize) -> Option<usize> {
        let remaining = if self.repeats { self.order.len() } else { self.order.len() - self.at };
        let distance = self.distance_to(self.next_position(entry)?)?;
        (distance == 0 || distance <= remaining / 2).then_some(distance)
    }

    /// Moves on to behind the use at this distance. Returns the items whose next use may have changed; the used item
    /// may be among them.
    pub(crate) fn advance(&mut self, distance: usize) -> Vec<ItemId> {
        let (from, next) = (self.at, self.at + distance + 1);
        self.at = if self.repeats { next % self.order.len() } else { next };
        // On a circle, an item with a single position keeps it.
        let passed: Vec<usize> = if self.repeats {
            let wrapped = next.saturating_sub(self.order.len());
            let part = |from, to| {
                let index = |position| self.repeated.partition_point(|other| *other < position);
                &self.repeated[index(from)..index(to)]
            };
            let (first, second) = (part(from, next.min(self.order.len())), part(0, wrapped));
            first.iter().chain(second).copied().collect()
        } else {
            (from..next).collect()
        };
        passed.into_iter().filter_map(|position| self.item_at(position)).collect()
    }

    /// The position of an entry's next use.
    fn next_position(&self, entry: usize) -> Option<usize> {
        let positions = &self.entries[entry].positions;
        let later = positions.partition_point(|position| *position < self.at);
        positions.get(later).or(positions.first().filter(|_| self.repeats)).copied()
    }

    /// An item's next use. `prefetch_rank` is its place among the prefetches, `last_use` the clock at its last use.
    pub(crate) fn next_use(&self, entry: Option<usize>, prefetch_rank: Option<u64>, last_use: u64) -> NextUse {
        match (prefetch_rank, entry) {
            (Some(rank), _) => NextUse::Prefetched(rank),
            (None, None) => NextUse::Unscheduled(Reverse(last_use)),
            (None, Some(entry)) => {
                self.next_position(entry).map_or(NextUse::Over(Reverse(last_use)), NextUse::Scheduled)
            }
        }
    }

    /// The upcoming keys in order, for one round.
    #[cfg(test)]
    pub(crate) fn upcoming(&self) -> Vec<Arc<str>> {
        let (past, next) = self.order.split_at(self.at.min(self.order.len()));
        let again = past.iter().take(if self.repeats { past.len() } else { 0 });
        next.iter().chain(again).map(|entry| Arc::clone(&self.entries[*entry].key)).collect()
    }

    pub(crate) fn rank(&self, next_use: NextUse) -> Rank {
        match next_use {
            // A past position of a schedule that does not repeat is no next use.
            NextUse::Scheduled(position) => Rank(NextUse::Scheduled(self.distance_to(position).unwrap_or(usize::MAX))),
            other => Rank(other),
        }
    }

    /// The first use of an item at this distance or more: its distance and its position.
    pub(crate) fn next_with_item(&self, distance: usize) -> Option<(usize, usize)> {
        let len = self.order.len();
        let (start, end) = (self.at + distance, if self.repeats { self.at + len } else { len });
        let first = || self.with_item.range(start..).next().copied();
        let second = || {
            let range = start.saturating_sub(len)..end.saturating_sub(len);
            if range.is_empty() { None } else { self.with_item.range(range).next().copied() }
        };
        let position = if start < len { first().or_else(second) } else { second() }?;
        self.distance_to(position).map(|distance| (distance, position))
    }

    /// The last use of an item at less than this distance: its distance and its position.
    pub(crate) fn last_with_item(&self, distance: usize) -> Option<(usize, usize)> {
        let (len, end) = (self.order.len(), self.at + distance);
        let second = || self.with_item.range(..end.saturating_sub(len)).next_back().copied();
        let first = || {
            let range = self.at..end.min(len);
            if range.is_empty() { None } else { self.with_item.range(range).next_back().copied() }
        };
        let position = second().or_else(first)?;
        self.distance_to(position).map(|distance| (distance, position))
    }
}

/// Items, sorted by their next use.
#[derive(PartialEq, Eq, Debug, Default)]
pub(crate) struct UseOrder(BTreeSet<(NextUse, ItemId)>);

impl UseOrder {
    pub(crate) fn insert(&mut self, next_use: NextUse, id: ItemId) {
        self.0.insert((next_use, id));
    }

    pub(crate) fn remove(&mut self, next_use: NextUse, id: ItemId) {
        self.0.remove(&(next_use, id));
    }

    /// The items from the one used last to the one used next.
    pub(crate) fn latest_first(&self, queue: &NextUseQueue) -> impl Iterator<Item = (Rank, ItemId)> {
        let (start, at, end) = Self::bounds(queue);
        let range = |from, to| self.0.range((from, to)).rev();
        let unscheduled = range(Bound::Included(end), Bound::Unbounded);
        let wrapped = range(Bound::Included(start), Bound::Excluded(at));
        let scheduled = range(Bound::Included(at), Bound::Excluded(end));
        let prefetched = range(Bound::Unbounded, Bound::Excluded(start));
        let all = unscheduled.chain(wrapped).chain(scheduled).chain(prefetched);
        all.map(|(next_use, id)| (queue.rank(*next_use), *id))
    }

    /// The item that is used next.
    pub(crate) fn soonest(&self, queue: &NextUseQueue) -> Option<(Rank, ItemId)> {
        let (start, at, end) = Self::bounds(queue);
        let first = |from, to| self.0.range((from, to)).next();
        let next = first(Bound::Unbounded, Bound::Excluded(start))
            .or_else(|| first(Bound::Included(at), Bound::Excluded(end)))
            .or_else(|| first(Bound::Included(start), Bound::Excluded(at)))
            .or_else(|| first(Bound::Included(end), Bound::Unbounded));
        next.map(|(next_use, id)| (queue.rank(*next_use), *id))
    }

    /// Where scheduled items begin, where the next of them is, and where they end.
    fn bounds(queue: &NextUseQueue) -> ((NextUse, ItemId), (NextUse, ItemId), (NextUse, ItemId)) {
        let first_unscheduled = NextUse::Unscheduled(Reverse(u64::MAX));
        ((NextUse::Scheduled(0), 0), (NextUse::Scheduled(queue.at), 0), (first_unscheduled, 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(keys: &str, repeats: bool) -> NextUseQueue {
        let mut queue = NextUseQueue::new(keys.chars().map(|key| key.to_string().into()).collect(), repeats);
        let keys: Vec<(usize, ItemId)> =
            queue.keys().map(|(entry, key)| (entry, ItemId::from(key.as_bytes()[0]))).collect();
        keys.into_iter().for_each(|(entry, id)| queue.set_item(entry, Some(id)));
        queue
    }

    fn upcoming(queue: &NextUseQueue) -> String {
        queue.upcoming().iter().map(|key| &**key).collect()
    }

    /// Uses an item. Returns the others whose next use changes.
    fn use_one(queue: &mut NextUseQueue, key: &str) -> String {
        let entry = queue.find(key).unwrap();
        let changed = queue.advance_of(entry).map(|distance| queue.advance(distance)).unwrap_or_default();
        changed.into_iter().map(|id| char::from(id as u8)).filter(|other| !key.contains(*other)).collect()
    }

    fn distance(queue: &NextUseQueue, key: &str) -> Option<usize> {
        queue.find(key).and_then(|entry| queue.distances(entry).min())
    }

    #[test]
    fn a_repeating_schedule_wraps_around() {
        let mut queue = queue("abcab", true);
        assert_eq!((distance(&queue, "a"), distance(&queue, "c"), distance(&queue, "x")), (Some(0), Some(2), None));
        for key in ["a", "b", "c"] {
            use_one(&mut queue, key);
        }
        assert_eq!(
            (distance(&queue, "a"), distance(&queue, "c"), upcoming(&queue).as_str()),
            (Some(0), Some(4), "ababc")
        );
        use_one(&mut queue, "a");
        use_one(&mut queue, "b");
        assert_eq!(upcoming(&queue), "abcab");
    }

    #[test]
    fn a_schedule_that_ends_ranks_past_items_last() {
        let mut queue = queue("abc", false);
        use_one(&mut queue, "a");
        assert_eq!((distance(&queue, "a"), upcoming(&queue).as_str()), (None, "bc"));
        let rank = |key, last_use| queue.rank(queue.next_use(queue.find(key), None, last_use));
        assert!(rank("a", 1000) > rank("other", 0));
        use_one(&mut queue, "b");
        use_one(&mut queue, "c");
        assert_eq!(upcoming(&queue), "");
        use_one(&mut queue, "c");
    }

    #[test]
    fn small_deviations_advance_the_schedule() {
        let mut queue = queue("abcdefgh", true);
        use_one(&mut queue, "b");
        assert_eq!(upcoming(&queue), "cdefghab", "one was skipped, or comes late");
        use_one(&mut queue, "a");
        assert_eq!(upcoming(&queue), "cdefghab", "it came late");
        use_one(&mut queue, "g");
        assert_eq!(upcoming(&queue), "habcdefg", "it was skipped");
    }

    #[test]
    fn skipped_uses_change_only_items_that_have_others() {
        let mut circle = queue("abcdabxy", true);
        assert_eq!(use_one(&mut circle, "c"), "ab", "each has another use in this round");
        let mut line = queue("abcdef", false);
        assert_eq!(use_one(&mut line, "c"), "ab", "their only use is over");
    }

    #[test]
    fn prefetched_items_rank_first() {
        let queue = queue("ab", true);
        let next_use = |key, rank, last_use| queue.rank(queue.next_use(queue.find(key), rank, last_use));
        let ranks = [
            next_use("x", Some(0), 0),
            next_use("y", Some(1), 9),
            next_use("a", None, 4),
            next_use("b", None, 9),
            next_use("z", None, 9),
            next_use("z", None, 6),
        ];
        assert!(ranks.windows(2).all(|pair| pair[0] < pair[1]), "{ranks:?}");
        assert!(NextUseQueue::default().upcoming().is_empty());
    }

    #[test]
    fn sorted_items_follow_a_circle() {
        let mut queue = queue("abcd", true);
        let mut order = UseOrder::default();
        for key in ["a", "b", "c", "d", "x"] {
            order.insert(queue.next_use(queue.find(key), None, 1), ItemId::from(key.as_bytes()[0]));
        }
        for (used, expected) in [("a", "xdcba"), ("b", "xadcb"), ("c", "xbadc"), ("d", "xcbad")] {
            let found: String = order.latest_first(&queue).map(|(_, id)| char::from(id as u8)).collect();
            assert_eq!(found, expected);
            assert!(order.latest_first(&queue).map(|(rank, _)| rank).is_sorted_by(|one, other| one > other));
            assert_eq!(order.soonest(&queue).map(|(_, id)| char::from(id as u8)), used.chars().next());
            use_one(&mut queue, used);
        }
    }

    #[test]
    fn uses_with_an_item_are_found_in_both_directions() {
        for repeats in [false, true] {
            let mut queue = queue("abcdef", repeats);
            for gone in ["a", "d"] {
                let entry = queue.find(gone).unwrap();
                queue.set_item(entry, None);
            }
            for _ in 0..6 {
                let keys = upcoming(&queue);
                for distance in 0..=keys.len() {
                    let has_item = |index: &usize| !matches!(&keys[*index..=*index], "a" | "d");
                    let next = (distance..keys.len()).find(has_item);
                    assert_eq!(queue.next_with_item(distance).map(|found| found.0), next, "{keys} from {distance}");
                    let last = (0..distance).rev().find(has_item);
                    assert_eq!(queue.last_with_item(distance).map(|found| found.0), last, "{keys} to {distance}");
                }
                if !keys.is_empty() {
                    queue.advance(0);
                }
            }
        }
    }
}
