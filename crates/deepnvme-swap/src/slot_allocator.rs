//! Slots of the arena, which contain items of different sizes: pure.
//!
//! Borrowed items cannot move; all others can be evicted. So the allocator searches not only free memory, but every
//! range between borrowed items, and takes the range whose items are used last. This gives a guarantee: a slot of `n`
//! bytes is found as soon as there are `n` bytes between two neighbouring borrowed items. With `k` of those, of `L`
//! bytes together, in an arena of `M`, that is certain for every `n` up to `(M - L) / (k + 1)`. If all slots have one
//! size, it is certain while that much memory is left.
//!
//! Large items go to the front of the arena and small ones to the back, so that small borrowed items do not split the
//! room for large ones.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// Identifies an item; never reused.
pub(crate) type ItemId = u64;

/// Items of at least this fraction of the arena count as large.
const LARGE_FRACTION: usize = 16;

/// The slots of the arena and their owners.
#[derive(Debug)]
pub(crate) struct SlotAllocator {
    len: usize,
    /// The length and the owner of each slot, by its start.
    taken: BTreeMap<usize, (usize, ItemId)>,
    used: usize,
}

/// A range that is long enough, and the items to evict from it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct VictimRange {
    pub(crate) start: usize,
    pub(crate) victims: Vec<ItemId>,
}

/// A free range, or a slot that can be evicted.
#[derive(Clone, Copy)]
struct Span {
    start: usize,
    len: usize,
    /// The item, and when it is used next.
    owner: Option<(ItemId, u64)>,
}

impl SlotAllocator {
    pub(crate) fn new(len: usize) -> Self {
        Self { len, taken: BTreeMap::new(), used: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Free bytes, contiguous or not.
    pub(crate) fn free_bytes(&self) -> usize {
        self.len - self.used
    }

    /// The owners of all slots.
    pub(crate) fn owners(&self) -> impl Iterator<Item = ItemId> {
        self.taken.values().map(|(_, id)| *id)
    }

    pub(crate) fn occupy(&mut self, start: usize, len: usize, id: ItemId) {
        let before = self.taken.insert(start, (len, id));
        debug_assert!(before.is_none() && start + len <= self.len, "{start} has an owner: {before:?}");
        self.used += len;
    }

    pub(crate) fn release(&mut self, start: usize) {
        let left = self.taken.remove(&start);
        debug_assert!(left.is_some(), "no slot begins at {start}");
        self.used -= left.map_or(0, |(len, _)| len);
    }

    /// Finds the smallest gap that is large enough.
    pub(crate) fn find_gap(&self, len: usize) -> Option<usize> {
        if len > self.free_bytes() {
            return None;
        }
        let mut best: Option<Range<usize>> = None;
        let mut at = 0;
        let ends = self.taken.iter().map(|(start, (len, _))| (*start, start + len)).chain([(self.len, self.len)]);
        for (start, end) in ends {
            let (gap, is_enough) = (at..start, start - at >= len);
            // Of equal gaps, large items take the first and small ones the last.
            let is_better = |best: &Range<usize>| match gap.len().cmp(&best.len()) {
                std::cmp::Ordering::Equal => !self.is_large(len),
                order => order.is_lt(),
            };
            if is_enough && best.as_ref().is_none_or(is_better) {
                best = Some(gap);
            }
            at = end;
        }
        best.map(|gap| self.place_in(&gap, len))
    }

    /// Finds the range whose items are used last. `next_use_of` is `None` for items that cannot be evicted. A range
    /// counts as its item that is used soonest.
    pub(crate) fn find_victims(
        &self,
        len: usize,
        mut next_use_of: impl FnMut(ItemId) -> Option<u64>,
    ) -> Option<VictimRange> {
        let mut best: Option<(u64, usize, VictimRange)> = None;
        // A sliding window of spans, and a monotonic queue of their next uses: its front is the soonest.
        let (mut spans, mut soonest): (VecDeque<Span>, VecDeque<(usize, u64)>) = (VecDeque::new(), VecDeque::new());
        let mut bytes = 0;
        let mut consider = |span: Option<Span>| {
            let Some(span) = span else {
                (bytes, _) = (0, (spans.clear(), soonest.clear()));
                return;
            };
            spans.push_back(span);
            bytes += span.len;
            if let Some((_, next_use)) = span.owner {
                while soonest.back().is_some_and(|(_, other)| *other >= next_use) {
                    soonest.pop_back();
                }
                soonest.push_back((span.start, next_use));
            }
            while let Some(first) = spans.front().copied().filter(|first| bytes - first.len >= len) {
                spans.pop_front();
                bytes -= first.len;
                if soonest.front().is_some_and(|(start, _)| *start == first.start) {
                    soonest.pop_front();
                }
            }
            if bytes < len {
                return;
            }
            let score = soonest.front().map_or(u64::MAX, |(_, next_use)| *next_use);
            let is_better = |(other, cost, _): &(u64, usize, VictimRange)| (score, *cost) > (*other, bytes);
            if best.as_ref().is_none_or(is_better) {
                let victims = spans.iter().filter_map(|span| span.owner.map(|(id, _)| id)).collect();
                let start = spans.front().map_or(0, |first| first.start);
                let start = self.place_in(&(start..start + bytes), len);
                best = Some((score, bytes, VictimRange { start, victims }));
            }
        };
        let mut at = 0;
        for (start, (owned, id)) in &self.taken {
            if *start > at {
                consider(Some(Span { start: at, len: start - at, owner: None }));
            }
            consider(next_use_of(*id).map(|next_use| Span {
                start: *start,
                len: *owned,
                owner: Some((*id, next_use)),
            }));
            at = start + owned;
        }
        if self.len > at {
            consider(Some(Span { start: at, len: self.len - at, owner: None }));
        }
        best.map(|(_, _, range)| range)
    }

    fn is_large(&self, len: usize) -> bool {
        len >= self.len / LARGE_FRACTION
    }

    /// Where in a range a slot goes.
    fn place_in(&self, span: &Range<usize>, len: usize) -> usize {
        if self.is_large(len) { span.start } else { span.end - len }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// An arena with these slots: the gap before each, its bytes, and its next use.
    fn arena(len: usize, parts: &[(usize, usize, Option<u64>)]) -> (SlotAllocator, Vec<Option<u64>>) {
        let (mut slots, mut at) = (SlotAllocator::new(len), 0);
        for (id, (gap, bytes, _)) in parts.iter().enumerate() {
            slots.occupy(at + gap, *bytes, id as ItemId);
            at += gap + bytes;
        }
        (slots, parts.iter().map(|part| part.2).collect())
    }

    #[test]
    fn slots_come_from_the_smallest_gap() {
        let (slots, _) = arena(160, &[(20, 10, None), (10, 20, None), (10, 40, None)]);
        assert_eq!(slots.find_gap(10), Some(30), "large: the first of two");
        assert_eq!(slots.find_gap(5), Some(65), "small: the end of the last");
        assert_eq!((slots.find_gap(51), slots.free_bytes()), (None, 90));
    }

    #[test]
    fn the_items_used_last_are_evicted() {
        let (slots, next_use) = arena(40, &[(0, 10, Some(3)), (0, 10, Some(9)), (0, 10, None), (0, 10, Some(5))]);
        let range = |len| slots.find_victims(len, |id| next_use[id as usize]);
        assert_eq!(range(10), Some(VictimRange { start: 10, victims: vec![1] }));
        assert_eq!(range(20), Some(VictimRange { start: 0, victims: vec![0, 1] }));
        assert_eq!(range(21), None, "a borrowed item is between");
    }

    proptest! {
        /// Brute force finds no better range.
        #[test]
        fn no_better_range_exists(
            parts in prop::collection::vec((0_usize..4, 1_usize..6, prop::option::of(0_u64..6)), 0..12),
            rest in 0_usize..4,
            len in 1_usize..20,
        ) {
            let total = parts.iter().map(|part| part.0 + part.1).sum::<usize>() + rest;
            let (slots, next_use) = arena(total, &parts);
            let mut owner = vec![None; total];
            for (start, (bytes, id)) in &slots.taken {
                owner[*start..start + bytes].fill(Some(*id));
            }
            let score = |start: usize| {
                let inside: Vec<ItemId> = owner[start..start + len].iter().flatten().copied().collect();
                let worst = inside.iter().map(|id| next_use[*id as usize]).min().unwrap_or(Some(u64::MAX));
                worst.map(|worst| (worst, inside))
            };
            let best = (0..(total + 1).saturating_sub(len)).filter_map(score).map(|(worst, _)| worst).max();
            let found = slots.find_victims(len, |id| next_use[id as usize]);
            prop_assert_eq!(found.is_some(), best.is_some());
            if let Some(VictimRange { start, victims }) = found {
                let (worst, mut inside) = score(start).unwrap();
                inside.dedup();
                prop_assert_eq!(Some(worst), best);
                prop_assert!(inside.iter().all(|id| victims.contains(id)));
                prop_assert_eq!(slots.find_gap(len).is_some(), worst == u64::MAX);
            }
            if let Some(start) = slots.find_gap(len) {
                prop_assert!(owner[start..start + len].iter().all(Option::is_none));
            }
        }

        /// The module's guarantee for the largest slot that is certain to be found.
        #[test]
        fn the_guarantee_holds(stay in prop::collection::vec((0_usize..40, 1_usize..10), 0..6), rest in 0_usize..40) {
            let parts: Vec<_> = stay.iter().map(|(gap, bytes)| (*gap, *bytes, None)).collect();
            let total = parts.iter().map(|part| part.0 + part.1).sum::<usize>() + rest;
            let (slots, _) = arena(total, &parts);
            let certain = slots.free_bytes() / (parts.len() + 1);
            prop_assert!(certain == 0 || slots.find_victims(certain, |_| None).is_some());
        }

        /// Equal slots fill the arena, in any order of allocation.
        #[test]
        fn equal_slots_fill_the_arena(order in prop::collection::vec(any::<prop::sample::Index>(), 1..60), rest in 0_usize..7) {
            let mut slots = SlotAllocator::new(8 * 7 + rest);
            let mut held: Vec<usize> = Vec::new();
            for (step, index) in order.iter().enumerate() {
                if held.len() == 8 {
                    prop_assert_eq!(slots.find_gap(7), None);
                    let gone = held.swap_remove(index.index(8));
                    slots.release(gone);
                }
                let start = slots.find_victims(7, |_| None).map(|range| range.start).unwrap();
                slots.occupy(start, 7, step as ItemId);
                held.push(start);
            }
        }
    }
}
