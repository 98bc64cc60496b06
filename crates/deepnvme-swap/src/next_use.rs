//! When each item is used next: pure.
//!
//! The caller's schedule gives exact positions, and prefetched items come before it. For all other items only the past
//! is known, so the most recently used one is expected first.

use std::collections::HashMap;
use std::sync::Arc;

/// Prefetched items rank before everything else, in the order of their prefetches.
const PREFETCHED_MAX: u64 = 1 << 40;
/// Scheduled items rank before unscheduled ones.
const SCHEDULED_MAX: u64 = 1 << 60;
/// Items whose last scheduled use is over rank last.
const NEVER: u64 = 1 << 62;

/// The order in which items are used.
#[derive(Debug, Default)]
pub(crate) struct NextUseQueue {
    keys: Vec<Arc<str>>,
    /// The positions of each key, ascending.
    positions: HashMap<Arc<str>, Vec<usize>>,
    repeats: bool,
    /// The position that is expected next.
    at: usize,
}

impl NextUseQueue {
    /// Starts at the beginning of `keys`; if it `repeats`, again after its end.
    pub(crate) fn new(keys: Vec<Arc<str>>, repeats: bool) -> Self {
        let mut positions: HashMap<Arc<str>, Vec<usize>> = HashMap::new();
        for (position, key) in keys.iter().enumerate() {
            positions.entry(Arc::clone(key)).or_default().push(position);
        }
        Self { keys, positions, repeats, at: 0 }
    }

    /// Advances the schedule to an item that is used. Out-of-order uses do not advance it.
    pub(crate) fn record_use(&mut self, key: &str) {
        if let Some(distance) = self.distance(key)
            && (distance == 0 || distance <= self.remaining() / 2)
        {
            let next = self.at + distance + 1;
            self.at = if self.repeats { next % self.keys.len() } else { next };
        }
    }

    /// The number of other uses before this item's next one; `None` if the item is not scheduled any more.
    pub(crate) fn distance(&self, key: &str) -> Option<usize> {
        let positions = self.positions.get(key)?;
        let later = positions.partition_point(|position| *position < self.at);
        match (positions.get(later), positions.first()) {
            (Some(position), _) => Some(position - self.at),
            (None, Some(first)) if self.repeats => Some(self.keys.len() - self.at + first),
            _ => None,
        }
    }

    /// The upcoming keys in order, for one round.
    pub(crate) fn upcoming(&self) -> impl Iterator<Item = &Arc<str>> {
        let (past, next) = self.keys.split_at(self.at.min(self.keys.len()));
        next.iter().chain(past.iter().take(if self.repeats { past.len() } else { 0 }))
    }

    /// The rank of an item's next use; smaller is sooner. `prefetch_rank` is its place among the prefetches, `age` the
    /// number of uses since its last one.
    pub(crate) fn next_use(&self, key: &str, prefetch_rank: Option<u64>, age: u64) -> u64 {
        if let Some(turn) = prefetch_rank {
            return turn.min(PREFETCHED_MAX - 1);
        }
        match self.distance(key) {
            Some(distance) => PREFETCHED_MAX + distance as u64,
            None if self.positions.contains_key(key) => NEVER + age,
            None => SCHEDULED_MAX + age,
        }
    }

    fn remaining(&self) -> usize {
        if self.repeats { self.keys.len() } else { self.keys.len() - self.at }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(keys: &str, repeats: bool) -> NextUseQueue {
        NextUseQueue::new(keys.chars().map(|key| key.to_string().into()).collect(), repeats)
    }

    fn upcoming(queue: &NextUseQueue) -> String {
        queue.upcoming().map(|key| &**key).collect()
    }

    #[test]
    fn a_repeating_schedule_wraps_around() {
        let mut queue = queue("abcab", true);
        assert_eq!((queue.distance("a"), queue.distance("c"), queue.distance("x")), (Some(0), Some(2), None));
        for key in ["a", "b", "c"] {
            queue.record_use(key);
        }
        assert_eq!((queue.distance("a"), queue.distance("c"), upcoming(&queue).as_str()), (Some(0), Some(4), "ababc"));
        queue.record_use("a");
        queue.record_use("b");
        assert_eq!(upcoming(&queue), "abcab");
    }

    #[test]
    fn a_schedule_that_ends_ranks_past_items_last() {
        let mut queue = queue("abc", false);
        queue.record_use("a");
        assert_eq!((queue.distance("a"), upcoming(&queue).as_str()), (None, "bc"));
        assert!(queue.next_use("a", None, 0) > queue.next_use("other", None, 1000));
        queue.record_use("b");
        queue.record_use("c");
        assert_eq!(upcoming(&queue), "");
        queue.record_use("c");
    }

    #[test]
    fn small_deviations_advance_the_schedule() {
        let mut queue = queue("abcdefgh", true);
        queue.record_use("b");
        assert_eq!(upcoming(&queue), "cdefghab", "one was skipped, or comes late");
        queue.record_use("a");
        assert_eq!(upcoming(&queue), "cdefghab", "it came late");
        queue.record_use("g");
        assert_eq!(upcoming(&queue), "habcdefg", "it was skipped");
    }

    #[test]
    fn prefetched_items_rank_first() {
        let queue = queue("ab", true);
        let next_uses = [
            queue.next_use("x", Some(0), 9),
            queue.next_use("y", Some(1), 0),
            queue.next_use("a", None, 5),
            queue.next_use("b", None, 0),
            queue.next_use("z", None, 0),
            queue.next_use("z", None, 3),
        ];
        assert!(next_uses.is_sorted() && next_uses.windows(2).all(|pair| pair[0] < pair[1]), "{next_uses:?}");
        assert_eq!(NextUseQueue::default().upcoming().count(), 0);
    }
}
