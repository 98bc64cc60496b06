//! Slots of the arena, which contain items of different sizes. This module does no I/O.
//!
//! Some slots are pinned: their items cannot be evicted now, and borrowed ones cannot move. All others can be evicted.
//! So a new slot may lie anywhere between two pinned ones, and `residency` takes a range whose items are used late.
//! This gives a guarantee: a slot of `n` bytes is found as soon as there are `n` bytes between two neighbouring pinned
//! slots. With `k` of those, of `L` bytes together, in an arena of `M`, that is certain for every `n` up to
//! `(M - L) / (k + 1)`. If all slots have one size, it is certain while that much memory is left.
//!
//! Large items go to the front of the arena and small ones to the back, so that small borrowed items do not split the
//! room for large ones.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::gap_index::GapIndex;

/// Identifies an item; never reused.
pub(crate) type ItemId = u64;

/// Items of at least the arena's length divided by this count as large.
const LARGE_FRACTION: usize = 16;

/// The slots of the arena and their owners.
#[derive(Debug)]
pub(crate) struct SlotAllocator {
    len: usize,
    /// The length and the owner of each slot, by its start.
    taken: BTreeMap<usize, (usize, ItemId)>,
    /// Free memory.
    free: GapIndex,
    /// Memory between pinned slots.
    unpinned: GapIndex,
    used: usize,
}

/// A free range, or a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Span {
    pub(crate) start: usize,
    pub(crate) len: usize,
    pub(crate) owner: Option<ItemId>,
}

impl SlotAllocator {
    pub(crate) fn new(len: usize) -> Self {
        Self { len, taken: BTreeMap::new(), free: GapIndex::new(len), unpinned: GapIndex::new(len), used: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Free bytes, contiguous or not.
    pub(crate) fn free_bytes(&self) -> usize {
        self.len - self.used
    }

    /// Gives free memory to an item. Its slot is not pinned.
    pub(crate) fn occupy(&mut self, start: usize, len: usize, id: ItemId) {
        let before = self.taken.insert(start, (len, id));
        debug_assert!(before.is_none() && start + len <= self.len, "{start} has an owner: {before:?}");
        self.free.occupy(start..start + len);
        self.used += len;
    }

    /// Frees a slot. If it is pinned, the caller unpins it as well.
    pub(crate) fn release(&mut self, start: usize) {
        let left = self.taken.remove(&start);
        debug_assert!(left.is_some(), "no slot begins at {start}");
        let Some((len, _)) = left else { return };
        self.free.release(start..start + len);
        self.used -= len;
    }

    pub(crate) fn pin(&mut self, slot: Range<usize>) {
        self.unpinned.occupy(slot);
    }

    pub(crate) fn unpin(&mut self, slot: Range<usize>) {
        self.unpinned.release(slot);
    }

    /// Finds the smallest gap that is large enough.
    pub(crate) fn find_gap(&self, len: usize) -> Option<usize> {
        // Of equal gaps, large items take the first and small ones the last.
        let gap = self.free.smallest(len, !self.is_large(len))?;
        Some(self.place_in(&gap, len))
    }

    /// Finds the smallest range without a pinned slot that is long enough.
    pub(crate) fn find_unpinned(&self, len: usize) -> Option<Range<usize>> {
        self.unpinned.smallest(len, !self.is_large(len))
    }

    /// The slot that begins at `start`.
    pub(crate) fn slot_at(&self, start: usize) -> Option<Span> {
        self.taken.get(&start).map(|(len, id)| Span { start, len: *len, owner: Some(*id) })
    }

    /// The spans from `start` on, where a slot or a gap begins.
    pub(crate) fn spans_from(&self, start: usize) -> impl Iterator<Item = Span> {
        let (mut at, mut slots) = (start, self.taken.range(start..).peekable());
        std::iter::from_fn(move || {
            let next = slots.peek().map_or(self.len, |(start, _)| **start);
            let span = if next > at {
                Span { start: at, len: next - at, owner: None }
            } else {
                let (start, (len, id)) = slots.next()?;
                Span { start: *start, len: *len, owner: Some(*id) }
            };
            at = span.start + span.len;
            Some(span)
        })
    }

    /// The spans before `end`, where a slot or a gap ends, from the last to the first.
    pub(crate) fn spans_before(&self, end: usize) -> impl Iterator<Item = Span> {
        let (mut at, mut slots) = (end, self.taken.range(..end).rev().peekable());
        std::iter::from_fn(move || {
            let last_end = slots.peek().map_or(0, |(start, (len, _))| **start + len);
            let span = if last_end < at {
                Span { start: last_end, len: at - last_end, owner: None }
            } else {
                let (start, (len, id)) = slots.next()?;
                Span { start: *start, len: *len, owner: Some(*id) }
            };
            at = span.start;
            Some(span)
        })
    }

    pub(crate) fn is_large(&self, len: usize) -> bool {
        len >= self.len / LARGE_FRACTION
    }

    /// Where in a range a slot goes.
    pub(crate) fn place_in(&self, range: &Range<usize>, len: usize) -> usize {
        if self.is_large(len) { range.start } else { range.end - len }
    }

    #[cfg(test)]
    pub(crate) fn gaps(&self) -> (Vec<Range<usize>>, Vec<Range<usize>>) {
        (self.free.iter().collect(), self.unpinned.iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// An arena with these slots: the gap before each and its bytes.
    fn arena(len: usize, parts: &[(usize, usize)]) -> SlotAllocator {
        let (mut slots, mut at) = (SlotAllocator::new(len), 0);
        for (id, (gap, bytes)) in parts.iter().enumerate() {
            slots.occupy(at + gap, *bytes, id as ItemId);
            at += gap + bytes;
        }
        slots
    }

    #[test]
    fn slots_come_from_the_smallest_gap() {
        let slots = arena(160, &[(20, 10), (10, 20), (10, 40)]);
        assert_eq!(slots.find_gap(10), Some(30), "large: the first of two");
        assert_eq!(slots.find_gap(5), Some(65), "small: the end of the last");
        assert_eq!((slots.find_gap(51), slots.free_bytes()), (None, 90));
    }

    #[test]
    fn spans_cover_the_arena_in_both_directions() {
        let slots = arena(20, &[(2, 3), (0, 5), (4, 1)]);
        let forwards: Vec<Span> = slots.spans_from(0).collect();
        let places: Vec<_> = forwards.iter().map(|span| (span.start, span.len, span.owner)).collect();
        assert_eq!(
            places,
            [(0, 2, None), (2, 3, Some(0)), (5, 5, Some(1)), (10, 4, None), (14, 1, Some(2)), (15, 5, None)]
        );
        let mut backwards: Vec<Span> = slots.spans_before(20).collect();
        backwards.reverse();
        assert_eq!(forwards, backwards);
        assert_eq!(slots.spans_from(5).next(), slots.slot_at(5));
    }

    proptest! {
        /// The module's guarantee for the largest slot that is certain to be found.
        #[test]
        fn the_guarantee_holds(stay in prop::collection::vec((0_usize..40, 1_usize..10), 0..6), rest in 0_usize..40) {
            let total = stay.iter().map(|part| part.0 + part.1).sum::<usize>() + rest;
            let mut slots = arena(total, &stay);
            let mut at = 0;
            for (gap, bytes) in &stay {
                slots.pin(at + gap..at + gap + bytes);
                at += gap + bytes;
            }
            let certain = slots.free_bytes() / (stay.len() + 1);
            prop_assert!(certain == 0 || slots.find_unpinned(certain).is_some());
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
                let start = slots.find_gap(7).unwrap();
                slots.occupy(start, 7, step as ItemId);
                held.push(start);
            }
        }
    }
}
