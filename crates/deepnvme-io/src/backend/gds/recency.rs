//! Address ranges in least-recently-used order, with their total bytes. This module does no I/O.

use std::collections::BTreeMap;

/// Disjoint ranges, each with a value.
#[derive(Debug)]
pub(crate) struct Recency<V> {
    /// By start address.
    entries: BTreeMap<usize, Entry<V>>,
    bytes: u64,
    uses: u64,
}

#[derive(Debug)]
struct Entry<V> {
    bytes: usize,
    value: V,
    used: u64,
}

impl<V> Default for Recency<V> {
    fn default() -> Self {
        Self { entries: BTreeMap::new(), bytes: 0, uses: 0 }
    }
}

impl<V> Recency<V> {
    /// Returns the start and value of the range that contains all of these bytes, and marks it as used.
    pub(crate) fn holding(&mut self, start: usize, bytes: usize) -> Option<(usize, &mut V)> {
        let (first, entry) = self.entries.range_mut(..=start).next_back()?;
        if start - first > entry.bytes || bytes > entry.bytes - (start - first) {
            return None;
        }
        self.uses += 1;
        entry.used = self.uses;
        Some((*first, &mut entry.value))
    }

    /// Returns the starts of the ranges that overlap these bytes, the last first.
    pub(crate) fn overlapping(&self, start: usize, bytes: usize) -> impl Iterator<Item = usize> {
        let before = self.entries.range(..start.saturating_add(bytes)).rev();
        before.take_while(move |(first, entry)| *first + entry.bytes > start).map(|(first, _)| *first)
    }

    /// Returns whether a range overlaps these bytes.
    pub(crate) fn overlaps(&self, start: usize, bytes: usize) -> bool {
        self.overlapping(start, bytes).next().is_some()
    }

    /// Returns the value of the range with this start, without marking it as used.
    pub(crate) fn at(&mut self, start: usize) -> Option<&mut V> {
        self.entries.get_mut(&start).map(|entry| &mut entry.value)
    }

    /// Adds a range, as the most recently used. It must not overlap another.
    pub(crate) fn insert(&mut self, start: usize, bytes: usize, value: V) {
        assert!(!self.overlaps(start, bytes), "ranges do not overlap");
        self.uses += 1;
        self.bytes += bytes as u64;
        self.entries.insert(start, Entry { bytes, value, used: self.uses });
    }

    /// Removes the least recently used of the ranges that may go.
    pub(crate) fn evict(&mut self, may_go: impl Fn(&V) -> bool) -> Option<V> {
        let those = self.entries.iter().filter(|(_, entry)| may_go(&entry.value));
        let oldest = those.min_by_key(|(_, entry)| entry.used).map(|(start, _)| *start);
        self.remove(oldest?)
    }

    /// Returns the bytes of all ranges.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Removes the range with this start.
    pub(crate) fn remove(&mut self, start: usize) -> Option<V> {
        let entry = self.entries.remove(&start)?;
        self.bytes -= entry.bytes as u64;
        Some(entry.value)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Insert(usize, usize),
        Use(usize, usize),
        Remove(usize),
        /// Of those with an odd value, or of all.
        Evict(bool),
    }

    fn step() -> impl Strategy<Value = Step> {
        let start = 0..60usize;
        prop_oneof![
            (start.clone(), 1..9usize).prop_map(|(start, bytes)| Step::Insert(start, bytes)),
            (start.clone(), 0..5usize).prop_map(|(start, bytes)| Step::Use(start, bytes)),
            start.prop_map(Step::Remove),
            any::<bool>().prop_map(Step::Evict),
        ]
    }

    proptest! {
        /// Compared with a list in order of use.
        #[test]
        fn it_agrees_with_a_list(steps in prop::collection::vec(step(), 1..80)) {
            let mut ranges = Recency::default();
            let mut list: Vec<(usize, usize, usize)> = Vec::new();
            for (serial, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Insert(start, bytes) => {
                        let is_free = list.iter().all(|(at, len, _)| start + bytes <= *at || at + len <= start);
                        prop_assert_eq!(ranges.overlaps(start, bytes), !is_free);
                        let overlapping = |(at, len, _): &&(usize, usize, usize)| start < at + len && *at < start + bytes;
                        prop_assert_eq!(ranges.overlapping(start, bytes).count(), list.iter().filter(overlapping).count());
                        if is_free {
                            ranges.insert(start, bytes, serial);
                            list.push((start, bytes, serial));
                        }
                    }
                    Step::Use(start, bytes) => {
                        // The end of one range may be the start of the next, which then contains the empty range.
                        let place = list.iter().rposition(|(at, len, _)| *at <= start && start + bytes <= at + len
                            && (bytes > 0 || list.iter().all(|(other, _, _)| *other <= *at || *other > start)));
                        let expected = place.map(|place| list.remove(place));
                        list.extend(expected);
                        let found = ranges.holding(start, bytes).map(|(at, value)| (at, *value));
                        prop_assert_eq!(found, expected.map(|(at, _, value)| (at, value)));
                    }
                    Step::Remove(start) => {
                        let place = list.iter().position(|(at, _, _)| *at == start);
                        let expected = place.map(|place| list.remove(place).2);
                        prop_assert_eq!(ranges.at(start).copied(), expected);
                        prop_assert_eq!(ranges.remove(start), expected);
                    }
                    Step::Evict(odd) => {
                        let place = list.iter().position(|(_, _, value)| !odd || value % 2 == 1);
                        let expected = place.map(|place| list.remove(place).2);
                        prop_assert_eq!(ranges.evict(|value| !odd || value % 2 == 1), expected);
                    }
                }
                prop_assert_eq!(ranges.bytes(), list.iter().map(|(_, len, _)| *len as u64).sum::<u64>());
            }
        }
    }
}
