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
    /// Finds a range, given the items that can be evicted and the starts of their slots, last use first. `single` is the
    /// best one that is large enough itself.
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

/// The first spans that have so many bytes, or all, and their bytes.
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
