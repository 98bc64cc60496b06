//! The gaps between occupied ranges, by place and by length. This module does no I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The gaps of `0..len`. No two of them touch.
#[derive(Debug)]
pub(crate) struct GapIndex {
    /// The end of each gap, by its start.
    ends: BTreeMap<usize, usize>,
    /// Length and start of each gap.
    by_len: BTreeSet<(usize, usize)>,
}

impl GapIndex {
    pub(crate) fn new(len: usize) -> Self {
        let mut gaps = Self { ends: BTreeMap::new(), by_len: BTreeSet::new() };
        gaps.insert(0..len);
        gaps
    }

    /// Takes a range out of the gap that contains it.
    pub(crate) fn occupy(&mut self, range: Range<usize>) {
        let gap = self.ends.range(..=range.start).next_back().map(|(start, end)| *start..*end);
        let gap = gap.filter(|gap| range.end <= gap.end);
        debug_assert!(gap.is_some(), "{range:?} is occupied already");
        let Some(gap) = gap else { return };
        self.remove(&gap);
        self.insert(gap.start..range.start);
        self.insert(range.end..gap.end);
    }

    /// Returns an occupied range, which joins the gaps that it touches.
    pub(crate) fn release(&mut self, range: Range<usize>) {
        let before = self.ends.range(..=range.start).next_back().map(|(start, end)| *start..*end);
        let before = before.filter(|before| before.end >= range.start);
        let after = self.ends.get(&range.end).map(|end| range.end..*end);
        debug_assert!(before.as_ref().is_none_or(|before| before.end == range.start), "{range:?} was not occupied");
        before.iter().chain(&after).for_each(|gap| self.remove(gap));
        let start = before.map_or(range.start, |gap| gap.start);
        self.insert(start..after.map_or(range.end, |gap| gap.end));
    }

    /// The smallest gap that is long enough; of equal ones the first, or the last.
    pub(crate) fn smallest(&self, len: usize, takes_last: bool) -> Option<Range<usize>> {
        let (found, mut start) = self.by_len.range((len, 0)..).next().copied()?;
        if takes_last && let Some((_, last)) = self.by_len.range((found, start)..=(found, usize::MAX)).next_back() {
            start = *last;
        }
        Some(start..start + found)
    }

    /// All gaps, by place.
    #[cfg(test)]
    pub(crate) fn iter(&self) -> impl Iterator<Item = Range<usize>> {
        self.ends.iter().map(|(start, end)| *start..*end)
    }

    fn insert(&mut self, gap: Range<usize>) {
        if !gap.is_empty() {
            self.ends.insert(gap.start, gap.end);
            self.by_len.insert((gap.len(), gap.start));
        }
    }

    fn remove(&mut self, gap: &Range<usize>) {
        self.ends.remove(&gap.start);
        self.by_len.remove(&(gap.len(), gap.start));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// It equals a map of single bytes.
        #[test]
        fn gaps_are_the_runs_of_free_bytes(steps in prop::collection::vec((0_usize..40, 1_usize..8), 0..60), len in 1_usize..9) {
            let (mut gaps, mut is_taken, mut ranges) = (GapIndex::new(40), [false; 40], Vec::<Range<usize>>::new());
            for (start, bytes) in steps {
                let range = start..(start + bytes).min(40);
                if let Some(index) = ranges.iter().position(|other| other.start <= start && start < other.end) {
                    let gone = ranges.swap_remove(index);
                    is_taken[gone.clone()].fill(false);
                    gaps.release(gone);
                } else if !is_taken[range.clone()].contains(&true) {
                    is_taken[range.clone()].fill(true);
                    gaps.occupy(range.clone());
                    ranges.push(range);
                }
                let mut found = [true; 40];
                gaps.iter().for_each(|gap| found[gap].fill(false));
                prop_assert_eq!(found, is_taken);
                let all: Vec<_> = gaps.iter().collect();
                prop_assert!(all.windows(2).all(|pair| pair[0].end < pair[1].start), "two gaps touch: {:?}", all);
                let smallest = all.iter().map(Range::len).filter(|found| *found >= len).min();
                let best = |gap: &&Range<usize>| Some(gap.len()) == smallest;
                prop_assert_eq!(gaps.smallest(len, false), all.iter().find(best).cloned());
                prop_assert_eq!(gaps.smallest(len, true), all.iter().rfind(best).cloned());
            }
        }
    }
}
