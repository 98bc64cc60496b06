//! Which bytes of the swap file belong to whom: pure.
//!
//! Whoever asks gets one stretch where there is one, the smallest that is enough. A file whose gaps are all too small would
//! grow for ever under items that come, go and change their size; before it becomes a quarter larger than what was ever
//! needed at once, an item is cut up and put into several gaps instead. Nothing is ever moved.
//!
//! The guarantee: the file never ends beyond [`SLACK`] times the most bytes that were in use at once, whatever happened
//! before, in whole grains.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The file's end, at most, in terms of the most that was in use at once: numerator and denominator.
pub(crate) const SLACK: (u64, u64) = (5, 4);

/// A stretch of the swap file.
pub(crate) type Extent = Range<u64>;

/// The bytes of one logical file. All stretches begin at, and are, multiples of a grain.
#[derive(Debug)]
pub(crate) struct Extents {
    grain: u64,
    /// Free stretches by where they begin; no two touch, and none touches the end.
    free: BTreeMap<u64, u64>,
    /// The same by length.
    by_len: BTreeSet<(u64, u64)>,
    end: u64,
    free_bytes: u64,
}

impl Extents {
    pub(crate) fn new(grain: u64) -> Self {
        assert!(grain > 0, "a grain has at least one byte");
        Self { grain, free: BTreeMap::new(), by_len: BTreeSet::new(), end: 0, free_bytes: 0 }
    }

    /// Where the last stretch in use ends.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Bytes in use.
    pub(crate) fn used(&self) -> u64 {
        self.end - self.free_bytes
    }

    /// Stretches for `bytes`, in the order in which they hold them; `None` where they would end beyond `end_max`. Of no
    /// bytes, none.
    pub(crate) fn allocate(&mut self, bytes: u64, end_max: u64) -> Option<Vec<Extent>> {
        let len = bytes.checked_next_multiple_of(self.grain)?;
        if len == 0 {
            return Some(Vec::new());
        }
        if let Some((found, start)) = self.by_len.range((len, 0)..).next().copied() {
            self.take(start, found);
            self.give(start + len, found - len);
            return Some(std::iter::once(start..start + len).collect());
        }
        let grown = self.end.checked_add(len)?;
        let needed = u128::from(self.used()) + u128::from(len);
        let is_lean = u128::from(grown) * u128::from(SLACK.1) <= needed * u128::from(SLACK.0);
        if is_lean && grown <= end_max {
            let start = std::mem::replace(&mut self.end, grown);
            return Some(std::iter::once(start..grown).collect());
        }
        if self.end.checked_add(len.saturating_sub(self.free_bytes))? > end_max {
            return None;
        }
        Some(self.scatter(len))
    }

    /// Takes the largest gaps, and the rest behind the end.
    fn scatter(&mut self, mut len: u64) -> Vec<Extent> {
        let mut pieces = Vec::new();
        while len > 0 {
            let Some((found, start)) = self.by_len.last().copied() else {
                pieces.push(self.end..self.end + len);
                self.end += len;
                break;
            };
            let part = found.min(len);
            self.take(start, found);
            self.give(start + part, found - part);
            pieces.push(start..start + part);
            len -= part;
        }
        pieces.sort_unstable_by_key(|piece| piece.start);
        pieces.dedup_by(|next, before| {
            let touches = before.end == next.start;
            if touches {
                before.end = next.end;
            }
            touches
        });
        pieces
    }

    /// Gives a stretch back. What is free at the end is no part of the file any more.
    pub(crate) fn free(&mut self, extent: Extent) {
        let Range { mut start, mut end } = extent;
        debug_assert!(start <= end && end <= self.end, "{start}..{end} is not in use");
        if start == end {
            return;
        }
        if let Some((before, len)) = self.free.range(..start).next_back().map(|(at, len)| (*at, *len)) {
            debug_assert!(before + len <= start, "{start}..{end} was free already");
            if before + len == start {
                self.take(before, len);
                start = before;
            }
        }
        if let Some(len) = self.free.get(&end).copied() {
            self.take(end, len);
            end += len;
        }
        if end == self.end {
            self.end = start;
        } else {
            self.give(start, end - start);
        }
    }

    fn take(&mut self, start: u64, len: u64) {
        if len > 0 {
            self.free.remove(&start);
            self.by_len.remove(&(len, start));
            self.free_bytes -= len;
        }
    }

    fn give(&mut self, start: u64, len: u64) {
        if len > 0 {
            self.free.insert(start, len);
            self.by_len.insert((len, start));
            self.free_bytes += len;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GRAIN: u64 = 4096;

    #[test]
    fn the_smallest_gap_that_is_enough_is_taken() {
        let mut extents = Extents::new(GRAIN);
        let mut all = |bytes| extents.allocate(bytes, u64::MAX).unwrap().remove(0);
        let (a, _b, c, _d) = (all(3 * GRAIN), all(1), all(2 * GRAIN), all(GRAIN));
        extents.free(a);
        extents.free(c.clone());
        assert_eq!(extents.allocate(GRAIN + 1, u64::MAX), Some(vec![c]));
        assert_eq!(extents.allocate(5, u64::MAX).unwrap()[0], 0..GRAIN);
        assert_eq!(extents.allocate(0, u64::MAX), Some(vec![]));
    }

    #[test]
    fn an_item_is_cut_up_before_the_file_grows_far() {
        let mut extents = Extents::new(GRAIN);
        let items: Vec<Extent> = (0..100).map(|_| extents.allocate(10 * GRAIN, u64::MAX).unwrap().remove(0)).collect();
        for item in items.iter().step_by(2) {
            extents.free(item.clone());
        }
        let end = extents.end();
        let scattered = extents.allocate(30 * GRAIN, u64::MAX).unwrap();
        assert!(scattered.len() == 3 && extents.end() == end, "{scattered:?}");
        assert_eq!(extents.allocate(500 * GRAIN, end), None, "there is no room");
        assert_eq!(extents.used(), 530 * GRAIN);
    }

    #[test]
    fn what_is_free_at_the_end_is_no_part_of_the_file() {
        let mut extents = Extents::new(GRAIN);
        let [a, b, c] = [1, 2, 3].map(|grains| extents.allocate(grains * GRAIN, u64::MAX).unwrap().remove(0));
        extents.free(b);
        assert_eq!(extents.end(), 6 * GRAIN);
        extents.free(c);
        assert_eq!(extents.end(), GRAIN);
        extents.free(a);
        assert_eq!((extents.end(), extents.used()), (0, 0));
    }

    proptest! {
        /// Items come, go and change their size for ever: nothing overlaps, nothing is lost, and the file stays small.
        #[test]
        fn the_file_stays_within_its_factor(
            steps in prop::collection::vec((0_usize..24, 0_u64..40 * GRAIN, any::<bool>()), 1..400)
        ) {
            let mut extents = Extents::new(GRAIN);
            let mut items: Vec<Vec<Extent>> = vec![Vec::new(); 24];
            let mut peak = 0;
            for (item, bytes, is_small) in steps {
                std::mem::take(&mut items[item]).into_iter().for_each(|extent| extents.free(extent));
                let bytes = if is_small { bytes % GRAIN } else { bytes };
                items[item] = extents.allocate(bytes, u64::MAX).unwrap();
                let held: u64 = items[item].iter().map(|extent| extent.end - extent.start).sum();
                prop_assert_eq!(held, bytes.next_multiple_of(GRAIN));
                let mut all: Vec<Extent> = items.iter().flatten().cloned().collect();
                all.sort_unstable_by_key(|extent| extent.start);
                prop_assert!(all.windows(2).all(|pair| pair[0].end <= pair[1].start), "{:?}", all);
                prop_assert!(all.iter().all(|extent| extent.start % GRAIN == 0 && extent.end <= extents.end()));
                let used: u64 = all.iter().map(|extent| extent.end - extent.start).sum();
                prop_assert_eq!(extents.used(), used);
                peak = peak.max(used);
                prop_assert!(extents.end() * SLACK.1 <= peak * SLACK.0, "{} of {}", extents.end(), peak);
                prop_assert_eq!(extents.end(), all.last().map_or(0, |extent| extent.end), "it ends where somebody is");
            }
        }

        #[test]
        fn a_file_that_may_not_grow_is_used_to_the_last_grain(sizes in prop::collection::vec(1_u64..9, 1..60), room in 1_u64..80) {
            let mut extents = Extents::new(1);
            let mut held: Vec<Vec<Extent>> = Vec::new();
            for (index, size) in sizes.iter().enumerate() {
                let fits = extents.used() + size <= room;
                let got = extents.allocate(*size, room);
                prop_assert_eq!(got.is_some(), fits, "{} of {}", size, room);
                held.extend(got);
                if index % 3 == 2 && !held.is_empty() {
                    held.swap_remove(index % held.len()).into_iter().for_each(|extent| extents.free(extent));
                }
            }
        }
    }
}
