//! Which bytes of the arena belong to whom: pure.
//!
//! Items have different sizes and cannot be moved while they are lent. All others can make room, so that a place is not
//! looked for in what is free, but in everything between those that stay: of all stretches that are long enough, the one
//! whose occupants can best be spared. The guarantee follows: a place of `n` bytes is found as soon as there are `n` bytes
//! between two neighbours that stay. With `k` of those, which have `L` bytes together, in an arena of `M`, that is certain
//! for every `n` up to `(M - L) / (k + 1)`; and where all places have one size, whenever so much is left at all. Large items
//! are put at the front and small ones at the back, so that small ones that stay are not strewn between large ones.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// An item's number.
pub(crate) type Id = u64;

/// From this part of the arena on an item is large.
const LARGE_PART: usize = 16;

/// Who is in the arena, and where.
#[derive(Debug)]
pub(crate) struct Places {
    len: usize,
    /// The bytes and the owner of each place, by where it begins.
    taken: BTreeMap<usize, (usize, Id)>,
    used: usize,
}

/// A stretch that is long enough, and who has to leave it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Window {
    pub(crate) start: usize,
    pub(crate) occupants: Vec<Id>,
}

/// A stretch of the arena: what is free, or whose it is.
#[derive(Clone, Copy)]
struct Stretch {
    start: usize,
    len: usize,
    /// The owner, and how well it can be spared.
    owner: Option<(Id, u64)>,
}

impl Places {
    pub(crate) fn new(len: usize) -> Self {
        Self { len, taken: BTreeMap::new(), used: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Bytes that are free, wherever they are.
    pub(crate) fn free(&self) -> usize {
        self.len - self.used
    }

    /// Who is in the arena.
    pub(crate) fn owners(&self) -> impl Iterator<Item = Id> {
        self.taken.values().map(|(_, id)| *id)
    }

    pub(crate) fn take(&mut self, start: usize, len: usize, id: Id) {
        let before = self.taken.insert(start, (len, id));
        debug_assert!(before.is_none() && start + len <= self.len, "{start} has an owner: {before:?}");
        self.used += len;
    }

    pub(crate) fn leave(&mut self, start: usize) {
        let left = self.taken.remove(&start);
        debug_assert!(left.is_some(), "nobody is at {start}");
        self.used -= left.map_or(0, |(len, _)| len);
    }

    /// The smallest gap that is enough.
    pub(crate) fn gap(&self, len: usize) -> Option<usize> {
        if len > self.free() {
            return None;
        }
        let mut best: Option<Range<usize>> = None;
        let mut at = 0;
        let ends = self.taken.iter().map(|(start, (len, _))| (*start, start + len)).chain([(self.len, self.len)]);
        for (start, end) in ends {
            let (gap, is_enough) = (at..start, start - at >= len);
            // Of equal ones the first for the large, and the last for the small.
            let is_better = |best: &Range<usize>| match gap.len().cmp(&best.len()) {
                std::cmp::Ordering::Equal => !self.is_large(len),
                order => order.is_lt(),
            };
            if is_enough && best.as_ref().is_none_or(is_better) {
                best = Some(gap);
            }
            at = end;
        }
        best.map(|gap| self.anchored(&gap, len))
    }

    /// The stretch whose occupants can best be spared. `spare` says how well that is for each, and nothing for those that
    /// stay; of a stretch, whoever can be spared least counts.
    pub(crate) fn window(&self, len: usize, mut spare: impl FnMut(Id) -> Option<u64>) -> Option<Window> {
        let mut best: Option<(u64, usize, Window)> = None;
        // The stretches under the window, and of their owners those that can be spared less than all behind them.
        let (mut under, mut least): (VecDeque<Stretch>, VecDeque<(usize, u64)>) = (VecDeque::new(), VecDeque::new());
        let mut bytes = 0;
        let mut consider = |stretch: Option<Stretch>| {
            let Some(stretch) = stretch else {
                (bytes, _) = (0, (under.clear(), least.clear()));
                return;
            };
            under.push_back(stretch);
            bytes += stretch.len;
            if let Some((_, spared)) = stretch.owner {
                while least.back().is_some_and(|(_, other)| *other >= spared) {
                    least.pop_back();
                }
                least.push_back((stretch.start, spared));
            }
            while let Some(first) = under.front().copied().filter(|first| bytes - first.len >= len) {
                under.pop_front();
                bytes -= first.len;
                if least.front().is_some_and(|(start, _)| *start == first.start) {
                    least.pop_front();
                }
            }
            if bytes < len {
                return;
            }
            let score = least.front().map_or(u64::MAX, |(_, spared)| *spared);
            let is_better = |(other, cost, _): &(u64, usize, Window)| (score, *cost) > (*other, bytes);
            if best.as_ref().is_none_or(is_better) {
                let occupants = under.iter().filter_map(|stretch| stretch.owner.map(|(id, _)| id)).collect();
                let start = under.front().map_or(0, |first| first.start);
                let start = self.anchored(&(start..start + bytes), len);
                best = Some((score, bytes, Window { start, occupants }));
            }
        };
        let mut at = 0;
        for (start, (owned, id)) in &self.taken {
            if *start > at {
                consider(Some(Stretch { start: at, len: start - at, owner: None }));
            }
            consider(spare(*id).map(|spared| Stretch { start: *start, len: *owned, owner: Some((*id, spared)) }));
            at = start + owned;
        }
        if self.len > at {
            consider(Some(Stretch { start: at, len: self.len - at, owner: None }));
        }
        best.map(|(_, _, window)| window)
    }

    fn is_large(&self, len: usize) -> bool {
        len >= self.len / LARGE_PART
    }

    /// Where in a stretch an item goes.
    fn anchored(&self, stretch: &Range<usize>, len: usize) -> usize {
        if self.is_large(len) { stretch.start } else { stretch.end - len }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// An arena with those places taken: bytes before each, its bytes, and how well it can be spared.
    fn arena(len: usize, parts: &[(usize, usize, Option<u64>)]) -> (Places, Vec<Option<u64>>) {
        let (mut places, mut at) = (Places::new(len), 0);
        for (id, (gap, bytes, _)) in parts.iter().enumerate() {
            places.take(at + gap, *bytes, id as Id);
            at += gap + bytes;
        }
        (places, parts.iter().map(|part| part.2).collect())
    }

    #[test]
    fn the_smallest_gap_is_taken_from_its_side() {
        let (places, _) = arena(160, &[(20, 10, None), (10, 20, None), (10, 40, None)]);
        assert_eq!(places.gap(10), Some(30), "large: the first of two");
        assert_eq!(places.gap(5), Some(65), "small: the end of the last");
        assert_eq!((places.gap(51), places.free()), (None, 90));
    }

    #[test]
    fn who_is_spared_best_leaves() {
        let (places, spared) = arena(40, &[(0, 10, Some(3)), (0, 10, Some(9)), (0, 10, None), (0, 10, Some(5))]);
        let window = |len| places.window(len, |id| spared[id as usize]);
        assert_eq!(window(10), Some(Window { start: 10, occupants: vec![1] }));
        assert_eq!(window(20), Some(Window { start: 0, occupants: vec![0, 1] }));
        assert_eq!(window(21), None, "one that stays is between");
    }

    proptest! {
        /// The window is the best there is, by trying all of them.
        #[test]
        fn no_better_window_exists(
            parts in prop::collection::vec((0_usize..4, 1_usize..6, prop::option::of(0_u64..6)), 0..12),
            rest in 0_usize..4,
            len in 1_usize..20,
        ) {
            let total = parts.iter().map(|part| part.0 + part.1).sum::<usize>() + rest;
            let (places, spared) = arena(total, &parts);
            let mut owner = vec![None; total];
            for (start, (bytes, id)) in &places.taken {
                owner[*start..start + bytes].fill(Some(*id));
            }
            let score = |start: usize| {
                let inside: Vec<Id> = owner[start..start + len].iter().flatten().copied().collect();
                let worst = inside.iter().map(|id| spared[*id as usize]).min().unwrap_or(Some(u64::MAX));
                worst.map(|worst| (worst, inside))
            };
            let best = (0..(total + 1).saturating_sub(len)).filter_map(score).map(|(worst, _)| worst).max();
            let found = places.window(len, |id| spared[id as usize]);
            prop_assert_eq!(found.is_some(), best.is_some());
            if let Some(Window { start, occupants }) = found {
                let (worst, mut inside) = score(start).unwrap();
                inside.dedup();
                prop_assert_eq!(Some(worst), best);
                prop_assert!(inside.iter().all(|id| occupants.contains(id)));
                prop_assert_eq!(places.gap(len).is_some(), worst == u64::MAX);
            }
            if let Some(start) = places.gap(len) {
                prop_assert!(owner[start..start + len].iter().all(Option::is_none));
            }
        }

        /// What is said of the largest item that is certain to find a place.
        #[test]
        fn the_guarantee_holds(stay in prop::collection::vec((0_usize..40, 1_usize..10), 0..6), rest in 0_usize..40) {
            let parts: Vec<_> = stay.iter().map(|(gap, bytes)| (*gap, *bytes, None)).collect();
            let total = parts.iter().map(|part| part.0 + part.1).sum::<usize>() + rest;
            let (places, _) = arena(total, &parts);
            let certain = places.free() / (parts.len() + 1);
            prop_assert!(certain == 0 || places.window(certain, |_| None).is_some());
        }

        /// Places of one size: as many as there is room for, in whatever order they come and go.
        #[test]
        fn equal_places_fill_the_arena(order in prop::collection::vec(any::<prop::sample::Index>(), 1..60), rest in 0_usize..7) {
            let mut places = Places::new(8 * 7 + rest);
            let mut held: Vec<usize> = Vec::new();
            for (step, index) in order.iter().enumerate() {
                if held.len() == 8 {
                    prop_assert_eq!(places.gap(7), None);
                    let gone = held.swap_remove(index.index(8));
                    places.leave(gone);
                }
                let start = places.window(7, |_| None).map(|window| window.start).unwrap();
                places.take(start, 7, step as Id);
                held.push(start);
            }
        }
    }
}
