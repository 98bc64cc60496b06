//! Finds the range of memory for a new slot: the one whose items are used last.
//!
//! A range counts as its item that is used soonest. The search takes the items from the one used last on, and grows a
//! range around each through free memory and items that are used no sooner. The first range that is long enough is the
//! best. With slots of one size, that is the first item's own.
//!
//! Small items that are used late may pile up, and no range of them is long enough. So after [`STEPS_MAX`] steps the
//! search takes the best single item that is large enough. If there is none, it takes the best of the ranges around the
//! first items, whatever is next to them.

use crate::slot_allocator::{ItemId, SlotAllocator, Span};

/// Spans that are looked at before the search settles for less.
pub(super) const STEPS_MAX: usize = 16;
/// Ranges that are compared then.
const RANGES_MAX: usize = 8;

/// A range that is long enough, and the items to evict from it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct VictimRange {
    pub(super) start: usize,
    pub(super) victims: Vec<ItemId>,
}

/// A search for a range of `len` bytes.
pub(super) struct VictimSearch<'a, R> {
    pub(super) slots: &'a SlotAllocator,
    pub(super) len: usize,
    /// When an item is used next; `None` for items that cannot be evicted.
    pub(super) rank_of: &'a dyn Fn(ItemId) -> Option<R>,
    /// Spans that may be looked at before the search settles for less.
    pub(super) steps_max: usize,
    /// Spans that were looked at.
    pub(super) steps: usize,
}

/// A window of spans: the rank of its item that is used soonest, its bytes, and its first and last span.
type Window<R> = (R, usize, usize, usize);

impl<R: Ord + Copy> VictimSearch<'_, R> {
    /// Finds a range, given the ranks of the items that can be evicted and the starts of their slots, last use first.
    /// `single` is the best one that is large enough itself.
    pub(super) fn find(
        &mut self,
        latest_first: impl Iterator<Item = (R, usize)>,
        single: Option<(R, usize)>,
    ) -> Option<VictimRange> {
        let mut first = Vec::new();
        for (rank, start) in latest_first {
            if let Some(range) = self.find_at(rank, start) {
                return Some(range);
            }
            if first.len() < RANGES_MAX {
                first.push(start);
            }
            if self.steps >= self.steps_max {
                let single = single.and_then(|(rank, start)| self.find_at(rank, start));
                return single.or_else(|| self.find_around(&first));
            }
        }
        None
    }

    /// The best range around a slot whose other items are used no sooner.
    fn find_at(&mut self, rank: R, start: usize) -> Option<VictimRange> {
        let (spans, seed) = self.spans_around(start, |other| other >= rank)?;
        let window = self.best_window(&spans, seed)?;
        Some(self.range_of(&spans, window))
    }

    /// The best range around one of these slots.
    fn find_around(&mut self, starts: &[usize]) -> Option<VictimRange> {
        let mut best: Option<(Window<R>, Vec<Span>)> = None;
        for start in starts {
            let Some((spans, seed)) = self.spans_around(*start, |_| true) else { continue };
            let Some(window) = self.best_window(&spans, seed) else { continue };
            if best.as_ref().is_none_or(|(other, _)| is_better(window, *other)) {
                best = Some((window, spans));
            }
        }
        best.map(|(window, spans)| self.range_of(&spans, window))
    }

    /// The spans around a slot, as far as `accepts` allows and no further than needed, and the slot's index among them;
    /// `None` if they are too short.
    fn spans_around(&mut self, start: usize, accepts: impl Fn(R) -> bool) -> Option<(Vec<Span>, usize)> {
        let slot = self.slots.slot_at(start)?;
        let missing = self.len.saturating_sub(slot.len);
        let is_open = |span: &Span| span.owner.is_none_or(|id| (self.rank_of)(id).is_some_and(&accepts));
        let (mut spans, before) = collect(self.slots.spans_before(start).take_while(is_open), missing);
        let seed = spans.len();
        spans.reverse();
        spans.push(slot);
        let (after, behind) = collect(self.slots.spans_from(start + slot.len).take_while(is_open), missing);
        spans.extend(after);
        // Those at which it stopped count as well.
        self.steps += spans.len() + 2;
        (before + slot.len + behind >= self.len).then_some((spans, seed))
    }

    /// The best window that contains the slot at `seed`.
    fn best_window(&self, spans: &[Span], seed: usize) -> Option<Window<R>> {
        let rank_of = |span: &Span| span.owner.and_then(self.rank_of);
        let seed_rank = rank_of(&spans[seed])?;
        let soonest = |soonest: R, span: &Span| rank_of(span).map_or(soonest, |rank| rank.min(soonest));
        // The soonest use from the slot up to each span behind it.
        let mut ranks_up_to = vec![seed_rank];
        for span in &spans[seed + 1..] {
            ranks_up_to.push(soonest(ranks_up_to[ranks_up_to.len() - 1], span));
        }
        let mut last = spans.len() - 1;
        let mut bytes: usize = spans[seed..].iter().map(|span| span.len).sum();
        let (mut rank, mut best) = (seed_rank, None);
        for first in (0..=seed).rev() {
            if first < seed {
                bytes += spans[first].len;
                rank = soonest(rank, &spans[first]);
            }
            while last > seed && bytes - spans[last].len >= self.len {
                bytes -= spans[last].len;
                last -= 1;
            }
            if bytes >= self.len {
                let window = (rank.min(ranks_up_to[last - seed]), bytes, first, last);
                // Of equal ones, the first in memory.
                if best.is_none_or(|other| !is_better(other, window)) {
                    best = Some(window);
                }
            }
        }
        best
    }

    fn range_of(&self, spans: &[Span], (_, bytes, first, last): Window<R>) -> VictimRange {
        let victims = spans[first..=last].iter().filter_map(|span| span.owner).collect();
        let start = spans[first].start;
        VictimRange { start: self.slots.place_in(&(start..start + bytes), self.len), victims }
    }
}

/// Takes spans until they have `enough` bytes together, or all of them. Returns the spans and their bytes.
fn collect(spans: impl Iterator<Item = Span>, enough: usize) -> (Vec<Span>, usize) {
    let (mut found, mut bytes) = (Vec::new(), 0);
    let mut spans = spans;
    while bytes < enough
        && let Some(span) = spans.next()
    {
        bytes += span.len;
        found.push(span);
    }
    (found, bytes)
}

/// Whether a window is used later, or has fewer bytes.
fn is_better<R: Ord>((rank, bytes, ..): Window<R>, (other_rank, other_bytes, ..): Window<R>) -> bool {
    rank > other_rank || (rank == other_rank && bytes < other_bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// An arena with these slots: the gap before each, its bytes, and its next use.
    fn arena(len: usize, parts: &[(usize, usize, Option<u64>)]) -> SlotAllocator {
        let (mut slots, mut at) = (SlotAllocator::new(len), 0);
        for (id, (gap, bytes, _)) in parts.iter().enumerate() {
            slots.occupy(at + gap, *bytes, id as ItemId);
            at += gap + bytes;
        }
        slots
    }

    /// Finds a range, and counts the steps.
    fn find(
        slots: &SlotAllocator,
        parts: &[(usize, usize, Option<u64>)],
        len: usize,
        steps_max: usize,
    ) -> (Option<VictimRange>, usize) {
        let rank_of = |id: ItemId| parts[id as usize].2;
        let mut latest: Vec<(u64, usize, usize)> =
            slots.spans_from(0).filter_map(|span| Some((rank_of(span.owner?)?, span.start, span.len))).collect();
        latest.sort_unstable_by(|one, other| other.cmp(one));
        let single = latest.iter().find(|(_, _, bytes)| *bytes >= len).map(|(rank, start, _)| (*rank, *start));
        let mut search = VictimSearch { slots, len, rank_of: &rank_of, steps_max, steps: 0 };
        let found = search.find(latest.into_iter().map(|(rank, start, _)| (rank, start)), single);
        (found, search.steps)
    }

    #[test]
    fn the_items_used_last_are_evicted() {
        let parts = [(0, 10, Some(3)), (0, 10, Some(9)), (0, 10, None), (0, 10, Some(5))];
        let slots = arena(40, &parts);
        let range = |len| find(&slots, &parts, len, usize::MAX).0;
        assert_eq!(range(10), Some(VictimRange { start: 10, victims: vec![1] }));
        assert_eq!(range(20), Some(VictimRange { start: 0, victims: vec![0, 1] }));
        assert_eq!(range(21), None, "a borrowed item is between");
    }

    #[test]
    fn a_search_that_is_cut_short_takes_a_single_item_or_the_best_neighbours() {
        // Small items that are used late, each next to one that is used soon.
        let mut parts: Vec<(usize, usize, Option<u64>)> = Vec::new();
        for index in 0..100 {
            parts.extend([(0, 1, Some(1000 - index)), (0, 1, Some(index))]);
        }
        let slots = arena(200, &parts);
        let (whole, steps) = find(&slots, &parts, 2, usize::MAX);
        assert_eq!(whole, Some(VictimRange { start: 198, victims: vec![198, 199] }));
        assert!(steps > 200, "{steps}");
        let (short, steps) = find(&slots, &parts, 2, STEPS_MAX);
        assert_eq!(short.map(|range| range.victims), Some(vec![10, 11]), "the latest of those around the first ones");
        assert!(steps < 80, "{steps}");
        parts.push((0, 2, Some(50)));
        let slots = arena(202, &parts);
        assert_eq!(find(&slots, &parts, 2, STEPS_MAX).0.map(|range| range.victims), Some(vec![200]));
    }

    proptest! {
        /// Brute force finds no better range. A search that is cut short finds one that is free or can be evicted.
        #[test]
        fn no_better_range_exists(
            parts in prop::collection::vec((0_usize..4, 1_usize..6, prop::option::of(0_u64..6)), 0..12),
            rest in 0_usize..4,
            len in 1_usize..20,
        ) {
            let total = parts.iter().map(|part| part.0 + part.1).sum::<usize>() + rest;
            let slots = arena(total, &parts);
            if slots.find_gap(len).is_some() {
                return Ok(());
            }
            let mut owner = vec![None; total];
            for span in slots.spans_from(0) {
                owner[span.start..span.start + span.len].fill(span.owner);
            }
            let score = |start: usize| {
                let inside: Vec<ItemId> = owner[start..start + len].iter().flatten().copied().collect();
                inside.iter().map(|id| parts[*id as usize].2).min().flatten().map(|worst| (worst, inside))
            };
            let best = (0..(total + 1).saturating_sub(len)).filter_map(score).map(|(worst, _)| worst).max();
            let (found, _) = find(&slots, &parts, len, usize::MAX);
            prop_assert_eq!(found.is_some(), best.is_some());
            if let Some(VictimRange { start, victims }) = found {
                let (worst, inside) = score(start).unwrap();
                prop_assert_eq!(Some(worst), best);
                prop_assert!(inside.iter().all(|id| victims.contains(id)));
            }
            if let (Some(VictimRange { start, victims }), _) = find(&slots, &parts, len, 1) {
                let (_, inside) = score(start).unwrap();
                prop_assert!(inside.iter().all(|id| victims.contains(id)));
            }
        }
    }
}
