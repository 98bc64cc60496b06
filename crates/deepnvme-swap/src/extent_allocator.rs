//! Allocates extents of the swap file. This module does no I/O.
//!
//! An item gets one extent if possible: the smallest gap that is large enough. Items that come, go and change size
//! would leave a file whose gaps are all too small, and it would grow forever. So before it grows beyond
//! [`FILE_TO_PEAK_MAX`], an item is split over several gaps. Extents never move.
//!
//! The guarantee: the end of the last extent never exceeds [`FILE_TO_PEAK_MAX`] times the peak of bytes in use,
//! whatever happened before. `swap_files` preallocates somewhat more.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The limit on the end of the last extent relative to the peak of bytes in use: numerator and denominator.
pub(crate) const FILE_TO_PEAK_MAX: (u64, u64) = (5, 4);

/// A range of the swap file.
pub(crate) type Extent = Range<u64>;

/// The extents of one logical file. All of them begin and end at multiples of the alignment.
#[derive(Debug)]
pub(crate) struct ExtentAllocator {
    alignment: u64,
    /// Free extents by start. No two touch, and none touches the end.
    free: BTreeMap<u64, u64>,
    /// The same by length.
    by_len: BTreeSet<(u64, u64)>,
    end: u64,
    free_bytes: u64,
}

impl ExtentAllocator {
    pub(crate) fn new(alignment: u64) -> Self {
        assert!(alignment > 0, "the alignment is at least one byte");
        Self { alignment, free: BTreeMap::new(), by_len: BTreeSet::new(), end: 0, free_bytes: 0 }
    }

    /// The end of the last extent in use.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Bytes in use.
    pub(crate) fn used(&self) -> u64 {
        self.end - self.free_bytes
    }

    /// Allocates extents for `bytes`, in the order of the item's bytes. `None` if the file would have to grow beyond
    /// `end_max`; empty for zero bytes. A gap beyond `end_max` may be used.
    pub(crate) fn allocate(&mut self, bytes: u64, end_max: u64) -> Option<Vec<Extent>> {
        let len = bytes.checked_next_multiple_of(self.alignment)?;
        if len == 0 {
            return Some(Vec::new());
        }
        if let Some((found, start)) = self.by_len.range((len, 0)..).next().copied() {
            self.remove_gap(start, found);
            self.insert_gap(start + len, found - len);
            return Some(std::iter::once(start..start + len).collect());
        }
        let grown = self.end.checked_add(len)?;
        let needed = u128::from(self.used()) + u128::from(len);
        let is_within_bound =
            u128::from(grown) * u128::from(FILE_TO_PEAK_MAX.1) <= needed * u128::from(FILE_TO_PEAK_MAX.0);
        if is_within_bound && grown <= end_max {
            let start = std::mem::replace(&mut self.end, grown);
            return Some(std::iter::once(start..grown).collect());
        }
        if self.end.checked_add(len.saturating_sub(self.free_bytes))? > end_max {
            return None;
        }
        Some(self.allocate_fragments(len))
    }

    /// Takes the largest gaps, then space behind the end.
    fn allocate_fragments(&mut self, mut len: u64) -> Vec<Extent> {
        let mut pieces = Vec::new();
        while len > 0 {
            let Some((found, start)) = self.by_len.last().copied() else {
                pieces.push(self.end..self.end + len);
                self.end += len;
                break;
            };
            let part = found.min(len);
            self.remove_gap(start, found);
            self.insert_gap(start + part, found - part);
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

    /// Frees an extent. Free space at the end is no longer part of the file.
    pub(crate) fn free(&mut self, extent: Extent) {
        let Range { mut start, mut end } = extent;
        debug_assert!(start <= end && end <= self.end, "{start}..{end} is not in use");
        if start == end {
            return;
        }
        if let Some((before, len)) = self.free.range(..start).next_back().map(|(at, len)| (*at, *len)) {
            debug_assert!(before + len <= start, "{start}..{end} was free already");
            if before + len == start {
                self.remove_gap(before, len);
                start = before;
            }
        }
        if let Some(len) = self.free.get(&end).copied() {
            self.remove_gap(end, len);
            end += len;
        }
        if end == self.end {
            self.end = start;
        } else {
            self.insert_gap(start, end - start);
        }
    }

    fn remove_gap(&mut self, start: u64, len: u64) {
        if len > 0 {
            self.free.remove(&start);
            self.by_len.remove(&(len, start));
            self.free_bytes -= len;
        }
    }

    fn insert_gap(&mut self, start: u64, len: u64) {
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

    const ALIGNMENT: u64 = 4096;

    #[test]
    fn the_smallest_gap_that_is_enough_is_taken() {
        let mut allocator = ExtentAllocator::new(ALIGNMENT);
        let mut all = |bytes| allocator.allocate(bytes, u64::MAX).unwrap().remove(0);
        let (a, _b, c, _d) = (all(3 * ALIGNMENT), all(1), all(2 * ALIGNMENT), all(ALIGNMENT));
        allocator.free(a);
        allocator.free(c.clone());
        assert_eq!(allocator.allocate(ALIGNMENT + 1, u64::MAX), Some(vec![c]));
        assert_eq!(allocator.allocate(5, u64::MAX).unwrap()[0], 0..ALIGNMENT);
        assert_eq!(allocator.allocate(0, u64::MAX), Some(vec![]));
    }

    #[test]
    fn an_item_is_split_before_the_file_grows_far() {
        let mut allocator = ExtentAllocator::new(ALIGNMENT);
        let items: Vec<Extent> =
            (0..100).map(|_| allocator.allocate(10 * ALIGNMENT, u64::MAX).unwrap().remove(0)).collect();
        for item in items.iter().step_by(2) {
            allocator.free(item.clone());
        }
        let end = allocator.end();
        let scattered = allocator.allocate(30 * ALIGNMENT, u64::MAX).unwrap();
        assert!(scattered.len() == 3 && allocator.end() == end, "{scattered:?}");
        assert_eq!(allocator.allocate(500 * ALIGNMENT, end), None, "no space is left");
        assert_eq!(allocator.used(), 530 * ALIGNMENT);
    }

    #[test]
    fn free_space_at_the_end_shrinks_the_file() {
        let mut allocator = ExtentAllocator::new(ALIGNMENT);
        let [a, b, c] = [1, 2, 3].map(|units| allocator.allocate(units * ALIGNMENT, u64::MAX).unwrap().remove(0));
        allocator.free(b);
        assert_eq!(allocator.end(), 6 * ALIGNMENT);
        allocator.free(c);
        assert_eq!(allocator.end(), ALIGNMENT);
        allocator.free(a);
        assert_eq!((allocator.end(), allocator.used()), (0, 0));
    }

    proptest! {
        /// Items come, go and change size: nothing overlaps, nothing is lost, and the file stays small.
        #[test]
        fn the_file_stays_within_its_factor(
            steps in prop::collection::vec((0_usize..24, 0_u64..40 * ALIGNMENT, any::<bool>()), 1..400)
        ) {
            let mut allocator = ExtentAllocator::new(ALIGNMENT);
            let mut items: Vec<Vec<Extent>> = vec![Vec::new(); 24];
            let mut peak = 0;
            for (item, bytes, is_small) in steps {
                std::mem::take(&mut items[item]).into_iter().for_each(|extent| allocator.free(extent));
                let bytes = if is_small { bytes % ALIGNMENT } else { bytes };
                items[item] = allocator.allocate(bytes, u64::MAX).unwrap();
                let held: u64 = items[item].iter().map(|extent| extent.end - extent.start).sum();
                prop_assert_eq!(held, bytes.next_multiple_of(ALIGNMENT));
                let mut all: Vec<Extent> = items.iter().flatten().cloned().collect();
                all.sort_unstable_by_key(|extent| extent.start);
                prop_assert!(all.windows(2).all(|pair| pair[0].end <= pair[1].start), "{:?}", all);
                prop_assert!(all.iter().all(|extent| extent.start % ALIGNMENT == 0 && extent.end <= allocator.end()));
                let used: u64 = all.iter().map(|extent| extent.end - extent.start).sum();
                prop_assert_eq!(allocator.used(), used);
                peak = peak.max(used);
                prop_assert!(allocator.end() * FILE_TO_PEAK_MAX.1 <= peak * FILE_TO_PEAK_MAX.0, "{} of {}", allocator.end(), peak);
                prop_assert_eq!(allocator.end(), all.last().map_or(0, |extent| extent.end), "the file ends with an extent in use");
            }
        }

        #[test]
        fn a_file_that_may_not_grow_is_used_to_the_last_unit(sizes in prop::collection::vec(1_u64..9, 1..60), units_max in 1_u64..80) {
            let mut allocator = ExtentAllocator::new(1);
            let mut held: Vec<Vec<Extent>> = Vec::new();
            for (index, size) in sizes.iter().enumerate() {
                let fits = allocator.used() + size <= units_max;
                let got = allocator.allocate(*size, units_max);
                prop_assert_eq!(got.is_some(), fits, "{} of {}", size, units_max);
                held.extend(got);
                if index % 3 == 2 && !held.is_empty() {
                    held.swap_remove(index % held.len()).into_iter().for_each(|extent| allocator.free(extent));
                }
            }
        }
    }
}
