//! Which layer group is in which slot, and which is fetched next. This module does no I/O.
//!
//! Groups of about the same size form a class, with equal slots. If a class has fewer slots than groups, some groups
//! are pinned, and the others stream through the remaining slots. Belady eviction would read as little, but its misses
//! cluster and stall compute, so the pinned groups are spread evenly over the order. A group is evicted only for one
//! that is expected sooner.
//!
//! Slots may overlap: several slots for small groups can lie in the memory of one large slot. Such a slot is taken from
//! all groups in it, and no group is pinned there.

use std::cmp::Reverse;

use crate::access_predictor::AccessPredictor;
use crate::layer_group::SlotClass;

/// The limits of a class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Class {
    /// Groups of this class that can be in memory at once; at least one.
    pub(crate) slots: usize,
    /// Groups that may be prefetched. Less than `slots`, unless the slots overlap those of another class.
    pub(crate) prefetch: usize,
}

impl From<&SlotClass> for Class {
    fn from(class: &SlotClass) -> Self {
        Self { slots: class.slots, prefetch: class.prefetch }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Absent,
    /// Not prefetched; fetched again when it is acquired.
    Failed,
    Loading {
        slot: usize,
        is_wanted: bool,
    },
    Ready {
        slot: usize,
        holds: u32,
        was_used: bool,
    },
}

/// The answer to a request for a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AcquireResult {
    /// It is in this slot, and stays until it is released.
    Held(usize),
    /// It is being fetched.
    Wait,
    /// Fetch it into this slot, from which other groups may have been evicted.
    Fetch(usize),
    /// All slots are being fetched into; wait for any of them.
    AllLoading,
    /// All slots are held.
    AllHeld,
}

/// The state of all groups and slots.
#[derive(Debug)]
pub(crate) struct Residency {
    classes: Vec<Class>,
    /// The groups of each class.
    members: Vec<Vec<usize>>,
    class_of: Vec<usize>,
    states: Vec<State>,
    /// Whether each group stays in memory once it is there.
    pinned: Vec<bool>,
    /// The class and the group of each slot.
    slots: Vec<(usize, Option<usize>)>,
    /// The slots that share memory with each slot.
    overlaps: Vec<Vec<usize>>,
    predictor: AccessPredictor,
}

impl Residency {
    /// `class_of` names the class of each group, in the order that is expected at first; `overlaps` the slots that
    /// share memory with each slot.
    pub(crate) fn new(class_of: Vec<usize>, classes: Vec<Class>, overlaps: Vec<Vec<usize>>) -> Self {
        let mut members = vec![Vec::new(); classes.len()];
        class_of.iter().enumerate().for_each(|(group, class)| members[*class].push(group));
        let slots = classes.iter().enumerate().flat_map(|(class, kept)| vec![(class, None); kept.slots]).collect();
        let groups = class_of.len();
        let states = vec![State::Absent; groups];
        let predictor = AccessPredictor::new(groups);
        let pinned = vec![false; groups];
        let mut residency = Self { classes, members, class_of, states, pinned, slots, overlaps, predictor };
        residency.choose_pinned();
        residency
    }

    /// Acquires a group, or says how to get it.
    pub(crate) fn acquire(&mut self, group: usize) -> AcquireResult {
        match &mut self.states[group] {
            State::Ready { slot, holds, was_used } => {
                (*holds, *was_used) = (*holds + 1, true);
                let slot = *slot;
                if self.predictor.record_use(group) {
                    self.choose_pinned();
                }
                AcquireResult::Held(slot)
            }
            State::Loading { is_wanted, .. } => {
                *is_wanted = true;
                AcquireResult::Wait
            }
            State::Absent | State::Failed => match self.find_slot(group, 0) {
                Some(slot) => {
                    self.start_fetch(group, slot, true);
                    AcquireResult::Fetch(slot)
                }
                None if self.loading_in_class(group).next().is_some() => AcquireResult::AllLoading,
                None => AcquireResult::AllHeld,
            },
        }
    }

    /// The next group to prefetch, and its slot.
    pub(crate) fn next_prefetch(&mut self) -> Option<(usize, usize)> {
        let expected = self.predictor.expected();
        let classes = 0..self.classes.len();
        let mut is_exhausted: Vec<bool> = classes.map(|class| !self.may_prefetch(class, &expected)).collect();
        for (distance, group) in expected.into_iter().enumerate() {
            let class = self.class_of[group];
            if is_exhausted[class] || self.states[group] != State::Absent {
                continue;
            }
            if let Some(slot) = self.find_slot(group, distance + 1) {
                self.start_fetch(group, slot, false);
                return Some((group, slot));
            }
            // Groups of this class that are expected later are no more urgent, nor are those that would take its
            // memory.
            (0..is_exhausted.len())
                .filter(|other| self.share_memory(class, *other))
                .for_each(|other| is_exhausted[other] = true);
        }
        None
    }

    /// Records the end of a fetch.
    pub(crate) fn fetch_completed(&mut self, group: usize) {
        if let State::Loading { slot, .. } = self.states[group] {
            self.states[group] = State::Ready { slot, holds: 0, was_used: false };
        }
    }

    /// Records the failure of a fetch.
    pub(crate) fn fetch_failed(&mut self, group: usize) {
        if let State::Loading { slot, .. } = self.states[group] {
            self.slots[slot].1 = None;
            self.states[group] = State::Failed;
        }
    }

    /// Releases a group. Returns false if it was not held.
    pub(crate) fn release(&mut self, group: usize) -> bool {
        match &mut self.states[group] {
            State::Ready { holds, .. } if *holds > 0 => {
                *holds -= 1;
                true
            }
            _ => false,
        }
    }

    /// The slot of a group that is held.
    pub(crate) fn held_slot(&self, group: usize) -> Option<usize> {
        match self.states[group] {
            State::Ready { slot, holds, .. } if holds > 0 => Some(slot),
            _ => None,
        }
    }

    /// Groups that are being fetched into slots of this group's class, or into their memory.
    pub(crate) fn loading_in_class(&self, group: usize) -> impl Iterator<Item = usize> {
        let class = self.class_of[group];
        let slots = (0..self.slots.len()).filter(move |slot| self.slots[*slot].0 == class);
        let loading = slots.flat_map(|slot| self.occupants(slot));
        loading.filter(|group| matches!(self.states[*group], State::Loading { .. }))
    }

    /// Whether each group is pinned, as far as the order is known.
    pub(crate) fn pinned(&self) -> &[bool] {
        &self.pinned
    }

    /// The groups in the memory of a slot.
    fn occupants(&self, slot: usize) -> impl Iterator<Item = usize> {
        std::iter::once(slot).chain(self.overlaps[slot].iter().copied()).filter_map(|slot| self.slots[slot].1)
    }

    /// Whether slots of these classes overlap, or the classes are equal.
    fn share_memory(&self, class: usize, other: usize) -> bool {
        let mut own = self.slots.iter().zip(&self.overlaps).filter(|((of, _), _)| *of == class);
        class == other || own.any(|(_, overlaps)| overlaps.iter().any(|slot| self.slots[*slot].0 == other))
    }

    /// Whether a class may prefetch one more group.
    fn may_prefetch(&self, class: usize, expected: &[usize]) -> bool {
        let is_early = |group: &&usize| match self.states[**group] {
            State::Loading { is_wanted, .. } => !is_wanted,
            State::Ready { holds, was_used, .. } => holds == 0 && !was_used,
            State::Absent | State::Failed => false,
        };
        // Pinned groups have slots of their own, and groups that are not expected are evicted first.
        let early = expected.iter().filter(|group| self.class_of[**group] == class && !self.pinned[**group]);
        early.filter(is_early).count() < self.classes[class].prefetch
    }

    /// A slot for a group that is expected at this distance: a free one, or one whose groups are expected last, if they
    /// are later. Pinned groups are evicted only for a group that a thread waits for, and only if there is no other
    /// slot.
    fn find_slot(&self, group: usize, distance: usize) -> Option<usize> {
        let mut due = vec![usize::MAX; self.states.len()];
        self.predictor.expected().into_iter().enumerate().for_each(|(distance, group)| due[group] = distance);
        let is_idle = |group: usize| matches!(self.states[group], State::Ready { holds: 0, .. });
        let own = (0..self.slots.len()).filter(|slot| self.slots[*slot].0 == self.class_of[group]);
        let idle = own.filter(|slot| self.occupants(*slot).all(is_idle));
        // A slot counts as its occupant that is expected soonest; pinned is sooner than streaming. An empty slot comes
        // last.
        let next_use = |slot: usize| self.occupants(slot).map(|group| (!self.pinned[group], due[group])).min();
        let last = (true, usize::MAX);
        let cost = |slot: &usize| (next_use(*slot).unwrap_or(last), next_use(*slot).is_none(), Reverse(*slot));
        let slot = idle.max_by_key(cost)?;
        let is_evictable = |(passes, due): (bool, usize)| passes && due >= distance;
        (distance == 0 || next_use(slot).is_none_or(is_evictable)).then_some(slot)
    }

    fn start_fetch(&mut self, group: usize, slot: usize, is_wanted: bool) {
        let before: Vec<usize> = self.occupants(slot).collect();
        before.into_iter().for_each(|before| self.states[before] = State::Absent);
        self.overlaps[slot].iter().for_each(|other| self.slots[*other].1 = None);
        self.slots[slot].1 = Some(group);
        self.states[group] = State::Loading { slot, is_wanted };
    }

    /// Chooses the pinned groups: as many of each class as it has slots to spare, frequent ones first, spread evenly.
    fn choose_pinned(&mut self) {
        let is_shared: Vec<bool> = (0..self.classes.len())
            .map(|class| {
                (0..self.slots.len()).any(|slot| self.slots[slot].0 == class && !self.overlaps[slot].is_empty())
            })
            .collect();
        for (index, (class, members)) in self.classes.iter().zip(&self.members).enumerate() {
            members.iter().for_each(|group| self.pinned[*group] = false);
            let streaming_slots = if members.len() <= class.slots { 0 } else { class.prefetch + 1 };
            let mut spare = if is_shared[index] { 0 } else { class.slots.saturating_sub(streaming_slots) };
            let (hot, cold): (Vec<usize>, Vec<usize>) =
                members.iter().partition(|group| self.predictor.is_frequent(**group, members));
            for group in [hot, cold] {
                let chosen = spare.min(group.len());
                for index in 0..chosen {
                    self.pinned[group[(index * group.len() + group.len() / 2) / chosen]] = true;
                }
                spare -= chosen;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer_group::layout;
    use crate::slot_memory::overlaps;

    fn one_class(groups: usize, slots: usize, prefetch: usize) -> Residency {
        Residency::new(vec![0; groups], vec![Class { slots, prefetch }], vec![vec![]; slots])
    }

    /// Runs steps in which every fetch ends before the next acquire. Returns the fetches of each step.
    fn cycle(residency: &mut Residency, groups: usize, steps: usize) -> Vec<Vec<usize>> {
        let mut fetched = Vec::new();
        for _ in 0..steps {
            let mut here = Vec::new();
            for group in 0..groups {
                match residency.acquire(group) {
                    AcquireResult::Held(_) => {}
                    AcquireResult::Fetch(_) => {
                        here.push(group);
                        residency.fetch_completed(group);
                        assert!(matches!(residency.acquire(group), AcquireResult::Held(_)));
                    }
                    other => panic!("{other:?}"),
                }
                while let Some((prefetch, _)) = residency.next_prefetch() {
                    here.push(prefetch);
                    residency.fetch_completed(prefetch);
                }
                assert!(residency.release(group));
                while let Some((prefetch, _)) = residency.next_prefetch() {
                    here.push(prefetch);
                    residency.fetch_completed(prefetch);
                }
            }
            fetched.push(here);
        }
        fetched
    }

    /// Returns the number of fetches of each of three steps.
    fn fetches_of_steps(groups: usize, slots: usize, prefetch: usize) -> Vec<usize> {
        let fetched = cycle(&mut one_class(groups, slots, prefetch), groups, 3);
        fetched.iter().map(Vec::len).collect()
    }

    #[test]
    fn groups_that_fit_are_fetched_once() {
        assert_eq!(fetches_of_steps(6, 6, 2), [6, 0, 0]);
    }

    #[test]
    fn pinned_groups_are_spread_over_the_order() {
        let mut residency = one_class(12, 6, 2);
        let fetched = cycle(&mut residency, 12, 6);
        let last = fetched.last().unwrap();
        assert_eq!(last.len(), 9, "3 of 6 slots stream");
        let mut next_use = last.clone();
        next_use.sort_unstable();
        let pinned: Vec<usize> = (0..12).filter(|group| !next_use.contains(group)).collect();
        assert_eq!(pinned.len(), 3);
        assert!(pinned.windows(2).all(|pair| pair[1] - pair[0] >= 3), "{pinned:?} is spread");
    }

    #[test]
    fn one_slot_is_enough() {
        assert_eq!(fetches_of_steps(4, 1, 0), [4, 4, 4]);
    }

    #[test]
    fn small_groups_use_a_large_slot_until_its_group_comes() {
        let (groups, large) = (7, 6);
        let classes = vec![Class { slots: 1, prefetch: 1 }, Class { slots: 3, prefetch: 2 }];
        let class_of = (0..groups).map(|group| usize::from(group != large)).collect();
        let mut residency = Residency::new(class_of, classes, vec![vec![1, 2, 3], vec![0], vec![0], vec![0]]);
        for step in 0..4 {
            let mut late = Vec::new();
            for group in 0..groups {
                while let AcquireResult::Fetch(_) = residency.acquire(group) {
                    late.push(group);
                    residency.fetch_completed(group);
                }
                while let Some((prefetch, _)) = residency.next_prefetch() {
                    assert_ne!(group, large, "it takes the whole memory");
                    residency.fetch_completed(prefetch);
                }
                assert!(residency.release(group));
                while let Some((prefetch, _)) = residency.next_prefetch() {
                    assert!(prefetch != large || group == 5, "small groups before it have not all been used");
                    residency.fetch_completed(prefetch);
                }
            }
            let expected = if step == 0 { vec![0] } else { vec![] };
            assert_eq!(late, expected, "all others come before they are called for");
        }
        assert!(residency.pinned().iter().all(|pinned| !pinned));
    }

    #[test]
    fn two_groups_in_one_slot_are_refused() {
        let mut residency = one_class(3, 1, 0);
        assert_eq!(residency.acquire(0), AcquireResult::Fetch(0));
        assert_eq!(residency.acquire(1), AcquireResult::AllLoading, "the only slot is being filled");
        residency.fetch_completed(0);
        assert_eq!(residency.acquire(0), AcquireResult::Held(0));
        assert_eq!(residency.acquire(1), AcquireResult::AllHeld);
        assert!(residency.release(0) && !residency.release(0));
        assert_eq!(residency.acquire(1), AcquireResult::Fetch(0));
        residency.fetch_failed(1);
        assert_eq!(residency.acquire(2), AcquireResult::Fetch(0), "its slot is free again");
    }

    #[test]
    fn a_failed_group_is_fetched_again_when_acquired() {
        let mut residency = one_class(3, 2, 1);
        assert_eq!(residency.next_prefetch(), Some((0, 0)));
        residency.fetch_failed(0);
        let next = residency.next_prefetch();
        assert_eq!(next, Some((1, 0)), "not the one that failed");
        residency.fetch_completed(1);
        assert_eq!(residency.acquire(0), AcquireResult::Fetch(1));
    }

    proptest::proptest! {
        #[test]
        fn any_order_works_and_held_groups_do_not_move(
            classes in proptest::collection::vec((1..5usize, 0..4usize, 1..5usize, proptest::bool::ANY), 1..4),
            groups in proptest::collection::vec(0..4usize, 1..24),
            calls in proptest::collection::vec((proptest::prelude::any::<proptest::sample::Index>(), 0..5u8), 1..200),
        ) {
            let shared = |&(slots, prefetch, slot_bytes, shares_memory): &(usize, usize, usize, bool)| {
                SlotClass { slots, prefetch: prefetch.min(slots - 1), slot_bytes, shares_memory }
            };
            let classes: Vec<SlotClass> = classes.iter().map(shared).collect();
            let overlaps = overlaps(&layout(&classes));
            let kept: Vec<Class> = classes.iter().map(Into::into).collect();
            let class_of: Vec<usize> = groups.iter().map(|class| class % kept.len()).collect();
            let mut residency = Residency::new(class_of.clone(), kept, overlaps.clone());
            let mut held: Vec<(usize, usize)> = Vec::new();
            for (pick, what) in calls {
                let group = pick.index(class_of.len());
                match what {
                    0 | 1 => match residency.acquire(group) {
                        AcquireResult::Held(slot) => held.push((group, slot)),
                        AcquireResult::Fetch(_) | AcquireResult::Wait => {}
                        AcquireResult::AllLoading => assert!(residency.loading_in_class(group).next().is_some()),
                        AcquireResult::AllHeld => {
                            let is_held = |slot: &usize| held.iter().any(|(_, other)| other == slot || overlaps[*slot].contains(other));
                            let own = (0..overlaps.len()).filter(|slot| residency.slots[*slot].0 == class_of[group]);
                            assert!(own.clone().all(|slot| is_held(&slot)), "refused only if all slots are held");
                        }
                    },
                    2 => if let Some(at) = held.iter().position(|(other, _)| *other == group) {
                        held.swap_remove(at);
                        assert!(residency.release(group));
                    },
                    3 => { residency.next_prefetch(); }
                    _ => {
                        let loading = residency.loading_in_class(group).next();
                        loading.into_iter().for_each(|loading| residency.fetch_completed(loading));
                    }
                }
                for (group, slot) in &held {
                    assert_eq!(residency.held_slot(*group), Some(*slot), "a held group keeps its slot");
                }
                let mut used: Vec<usize> = Vec::new();
                for (group, state) in residency.states.iter().enumerate() {
                    if let State::Loading { slot, .. } | State::Ready { slot, .. } = state {
                        assert_eq!(residency.slots[*slot], (class_of[group], Some(group)));
                        used.push(*slot);
                    }
                }
                let count = used.len();
                used.sort_unstable();
                used.dedup();
                assert_eq!(used.len(), count, "a slot has one group");
                for slot in &used {
                    assert!(overlaps[*slot].iter().all(|other| !used.contains(other)), "memory has one group");
                }
            }
        }
    }
}
