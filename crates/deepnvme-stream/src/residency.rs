//! Which unit is in which slot, and what is fetched next: pure.
//!
//! Units of about the same size are a class, with slots that fit each of them. Where a class has fewer slots than units,
//! some of the units stay for good and the others pass through the rest of the slots. To replace whoever is used last would
//! be as few bytes, but then all misses come in a row, and the disk rests while the layers in memory compute; so those that
//! stay are spread evenly over the order. A unit that is not expected soon makes room for one that is, never the other way.
//!
//! Slots may lie in each other's memory: that of a large unit is several slots for small ones while it is not there. Such a
//! slot is had by taking it from all who are in it. Nobody stays in one.

use std::cmp::Reverse;

use crate::access_predictor::Forecast;

/// How a class of units is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Class {
    /// Units of this class that can be in memory at once. At least one.
    pub(crate) slots: usize,
    /// Units that may be fetched before they are called for. Less than `slots`, unless those are in others' memory.
    pub(crate) ahead: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Absent,
    /// `failed` units are not fetched until somebody calls for them.
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

/// What to do for who calls for a unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Call {
    /// It is in that slot, and stays until it is released.
    Held(usize),
    /// It is on its way.
    Wait,
    /// It has to be fetched into that slot, from which another unit may have been taken.
    Fetch(usize),
    /// All slots are being filled: wait for any of these units.
    Full,
    /// All slots are held.
    Stuck,
}

/// The state of all units and slots.
#[derive(Debug)]
pub(crate) struct Residency {
    classes: Vec<Class>,
    /// Units of each class.
    members: Vec<Vec<usize>>,
    class_of: Vec<usize>,
    states: Vec<State>,
    /// Whether it stays once it is there.
    stays: Vec<bool>,
    /// Class and unit of each slot.
    slots: Vec<(usize, Option<usize>)>,
    /// The other slots that have some of the memory of each slot.
    overlaps: Vec<Vec<usize>>,
    forecast: Forecast,
}

impl Residency {
    /// `class_of` has the class of each unit, in the order in which they are expected at first; `overlaps` the other slots
    /// that have some of the memory of each slot.
    pub(crate) fn new(class_of: Vec<usize>, classes: Vec<Class>, overlaps: Vec<Vec<usize>>) -> Self {
        let mut members = vec![Vec::new(); classes.len()];
        class_of.iter().enumerate().for_each(|(unit, class)| members[*class].push(unit));
        let slots = classes.iter().enumerate().flat_map(|(class, kept)| vec![(class, None); kept.slots]).collect();
        let units = class_of.len();
        let states = vec![State::Absent; units];
        let forecast = Forecast::new(units);
        let stays = vec![false; units];
        let mut residency = Self { classes, members, class_of, states, stays, slots, overlaps, forecast };
        residency.settle();
        residency
    }

    /// Somebody calls for a unit.
    pub(crate) fn call(&mut self, unit: usize) -> Call {
        match &mut self.states[unit] {
            State::Ready { slot, holds, was_used } => {
                (*holds, *was_used) = (*holds + 1, true);
                let slot = *slot;
                if self.forecast.called(unit) {
                    self.settle();
                }
                Call::Held(slot)
            }
            State::Loading { is_wanted, .. } => {
                *is_wanted = true;
                Call::Wait
            }
            State::Absent | State::Failed => match self.room(unit, 0) {
                Some(slot) => {
                    self.begin(unit, slot, true);
                    Call::Fetch(slot)
                }
                None if self.loading_beside(unit).next().is_some() => Call::Full,
                None => Call::Stuck,
            },
        }
    }

    /// The next unit to fetch before it is called for, and the slot for it.
    pub(crate) fn next_ahead(&mut self) -> Option<(usize, usize)> {
        let expected = self.forecast.expected();
        let classes = 0..self.classes.len();
        let mut is_closed: Vec<bool> = classes.map(|class| !self.has_leave(class, &expected)).collect();
        for (distance, unit) in expected.into_iter().enumerate() {
            let class = self.class_of[unit];
            if is_closed[class] || self.states[unit] != State::Absent {
                continue;
            }
            if let Some(slot) = self.room(unit, distance + 1) {
                self.begin(unit, slot, false);
                return Some((unit, slot));
            }
            // What comes later in this class is no more urgent, nor is what would take the memory that this one waits for.
            (0..is_closed.len()).filter(|other| self.meet(class, *other)).for_each(|other| is_closed[other] = true);
        }
        None
    }

    /// The bytes of a unit have come.
    pub(crate) fn landed(&mut self, unit: usize) {
        if let State::Loading { slot, .. } = self.states[unit] {
            self.states[unit] = State::Ready { slot, holds: 0, was_used: false };
        }
    }

    /// They will not come.
    pub(crate) fn failed(&mut self, unit: usize) {
        if let State::Loading { slot, .. } = self.states[unit] {
            self.slots[slot].1 = None;
            self.states[unit] = State::Failed;
        }
    }

    /// Whoever called for the unit needs it no more.
    pub(crate) fn release(&mut self, unit: usize) -> bool {
        match &mut self.states[unit] {
            State::Ready { holds, .. } if *holds > 0 => {
                *holds -= 1;
                true
            }
            _ => false,
        }
    }

    /// The slot of a unit that is held.
    pub(crate) fn held_in(&self, unit: usize) -> Option<usize> {
        match self.states[unit] {
            State::Ready { slot, holds, .. } if holds > 0 => Some(slot),
            _ => None,
        }
    }

    /// Units that are on their way into the slots of this one's class, or into their memory.
    pub(crate) fn loading_beside(&self, unit: usize) -> impl Iterator<Item = usize> {
        let class = self.class_of[unit];
        let slots = (0..self.slots.len()).filter(move |slot| self.slots[*slot].0 == class);
        let loading = slots.flat_map(|slot| self.inside(slot));
        loading.filter(|unit| matches!(self.states[*unit], State::Loading { .. }))
    }

    /// Whether each unit stays once it is there, as far as that is known.
    pub(crate) fn stays(&self) -> &[bool] {
        &self.stays
    }

    /// Units in the memory of a slot.
    fn inside(&self, slot: usize) -> impl Iterator<Item = usize> {
        std::iter::once(slot).chain(self.overlaps[slot].iter().copied()).filter_map(|slot| self.slots[slot].1)
    }

    /// Whether slots of these classes lie in each other's memory, or are the same.
    fn meet(&self, class: usize, other: usize) -> bool {
        let mut own = self.slots.iter().zip(&self.overlaps).filter(|((of, _), _)| *of == class);
        class == other || own.any(|(_, overlaps)| overlaps.iter().any(|slot| self.slots[*slot].0 == other))
    }

    /// Whether a class may fetch one more unit that nobody has called for.
    fn has_leave(&self, class: usize, expected: &[usize]) -> bool {
        let is_early = |unit: &&usize| match self.states[**unit] {
            State::Loading { is_wanted, .. } => !is_wanted,
            State::Ready { holds, was_used, .. } => holds == 0 && !was_used,
            State::Absent | State::Failed => false,
        };
        // Those that stay have slots of their own, and who is expected no more is the first to go.
        let early = expected.iter().filter(|unit| self.class_of[**unit] == class && !self.stays[**unit]);
        early.filter(is_early).count() < self.classes[class].ahead
    }

    /// A slot for a unit that is expected at that distance: a free one, or one whose units are expected last, if they are
    /// later. Those that stay are taken for a unit that somebody waits for only, and only where there is no other.
    fn room(&self, unit: usize, distance: usize) -> Option<usize> {
        let mut due = vec![usize::MAX; self.states.len()];
        self.forecast.expected().into_iter().enumerate().for_each(|(distance, unit)| due[unit] = distance);
        let is_idle = |unit: usize| matches!(self.states[unit], State::Ready { holds: 0, .. });
        let own = (0..self.slots.len()).filter(|slot| self.slots[*slot].0 == self.class_of[unit]);
        let idle = own.filter(|slot| self.inside(*slot).all(is_idle));
        // Who would be missed most, of those in it; nobody is missed least.
        let missed = |slot: usize| self.inside(slot).map(|unit| (!self.stays[unit], due[unit])).min();
        let last = (true, usize::MAX);
        let cost = |slot: &usize| (missed(*slot).unwrap_or(last), missed(*slot).is_none(), Reverse(*slot));
        let slot = idle.max_by_key(cost)?;
        let may_go = |(passes, due): (bool, usize)| passes && due >= distance;
        (distance == 0 || missed(slot).is_none_or(may_go)).then_some(slot)
    }

    fn begin(&mut self, unit: usize, slot: usize, is_wanted: bool) {
        let before: Vec<usize> = self.inside(slot).collect();
        before.into_iter().for_each(|before| self.states[before] = State::Absent);
        self.overlaps[slot].iter().for_each(|other| self.slots[*other].1 = None);
        self.slots[slot].1 = Some(unit);
        self.states[unit] = State::Loading { slot, is_wanted };
    }

    /// Decides anew who stays: of each class as many as it has slots to spare, the hot ones first, evenly spread.
    fn settle(&mut self) {
        let is_shared: Vec<bool> = (0..self.classes.len())
            .map(|class| {
                (0..self.slots.len()).any(|slot| self.slots[slot].0 == class && !self.overlaps[slot].is_empty())
            })
            .collect();
        for (index, (class, members)) in self.classes.iter().zip(&self.members).enumerate() {
            members.iter().for_each(|unit| self.stays[*unit] = false);
            let passing = if members.len() <= class.slots { 0 } else { class.ahead + 1 };
            let mut spare = if is_shared[index] { 0 } else { class.slots.saturating_sub(passing) };
            let (hot, cold): (Vec<usize>, Vec<usize>) =
                members.iter().partition(|unit| self.forecast.is_hot(**unit, members));
            for group in [hot, cold] {
                let chosen = spare.min(group.len());
                for index in 0..chosen {
                    self.stays[group[(index * group.len() + group.len() / 2) / chosen]] = true;
                }
                spare -= chosen;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer_group::{SlotClass, layout};
    use crate::slot_memory::overlaps;

    fn one_class(units: usize, slots: usize, ahead: usize) -> Residency {
        Residency::new(vec![0; units], vec![Class { slots, ahead }], vec![vec![]; slots])
    }

    /// Runs steps in which every fetch lands before the next call; how many fetches each step had, and which units missed.
    fn cycle(residency: &mut Residency, units: usize, steps: usize) -> Vec<Vec<usize>> {
        let mut fetched = Vec::new();
        for _ in 0..steps {
            let mut here = Vec::new();
            for unit in 0..units {
                match residency.call(unit) {
                    Call::Held(_) => {}
                    Call::Fetch(_) => {
                        here.push(unit);
                        residency.landed(unit);
                        assert!(matches!(residency.call(unit), Call::Held(_)));
                    }
                    other => panic!("{other:?}"),
                }
                while let Some((ahead, _)) = residency.next_ahead() {
                    here.push(ahead);
                    residency.landed(ahead);
                }
                assert!(residency.release(unit));
                while let Some((ahead, _)) = residency.next_ahead() {
                    here.push(ahead);
                    residency.landed(ahead);
                }
            }
            fetched.push(here);
        }
        fetched
    }

    #[test]
    fn what_fits_is_fetched_once() {
        let mut residency = one_class(6, 6, 2);
        let fetched = cycle(&mut residency, 6, 3);
        assert_eq!(fetched.iter().map(Vec::len).collect::<Vec<_>>(), [6, 0, 0]);
    }

    #[test]
    fn those_that_stay_are_spread_over_the_order() {
        let mut residency = one_class(12, 6, 2);
        let fetched = cycle(&mut residency, 12, 6);
        let last = fetched.last().unwrap();
        assert_eq!(last.len(), 9, "3 of 6 slots pass units on");
        let mut missed = last.clone();
        missed.sort_unstable();
        let stays: Vec<usize> = (0..12).filter(|unit| !missed.contains(unit)).collect();
        assert_eq!(stays.len(), 3);
        assert!(stays.windows(2).all(|pair| pair[1] - pair[0] >= 3), "{stays:?} is spread");
    }

    #[test]
    fn one_slot_is_enough() {
        let mut residency = one_class(4, 1, 0);
        let fetched = cycle(&mut residency, 4, 3);
        assert_eq!(fetched.iter().map(Vec::len).collect::<Vec<_>>(), [4, 4, 4]);
    }

    #[test]
    fn a_large_slot_is_small_ones_until_its_unit_comes() {
        let (units, large) = (7, 6);
        let classes = vec![Class { slots: 1, ahead: 1 }, Class { slots: 3, ahead: 2 }];
        let class_of = (0..units).map(|unit| usize::from(unit != large)).collect();
        let mut residency = Residency::new(class_of, classes, vec![vec![1, 2, 3], vec![0], vec![0], vec![0]]);
        for step in 0..4 {
            let mut late = Vec::new();
            for unit in 0..units {
                while let Call::Fetch(_) = residency.call(unit) {
                    late.push(unit);
                    residency.landed(unit);
                }
                while let Some((ahead, _)) = residency.next_ahead() {
                    assert_ne!(unit, large, "it has all the memory");
                    residency.landed(ahead);
                }
                assert!(residency.release(unit));
                while let Some((ahead, _)) = residency.next_ahead() {
                    assert!(ahead != large || unit == 5, "the small ones before it have not all been used");
                    residency.landed(ahead);
                }
            }
            let expected = if step == 0 { vec![0] } else { vec![] };
            assert_eq!(late, expected, "all others come before they are called for");
        }
        assert!(residency.stays().iter().all(|stays| !stays));
    }

    #[test]
    fn two_at_once_in_one_slot_are_refused_and_not_waited_for() {
        let mut residency = one_class(3, 1, 0);
        assert_eq!(residency.call(0), Call::Fetch(0));
        assert_eq!(residency.call(1), Call::Full, "the only slot is being filled");
        residency.landed(0);
        assert_eq!(residency.call(0), Call::Held(0));
        assert_eq!(residency.call(1), Call::Stuck);
        assert!(residency.release(0) && !residency.release(0));
        assert_eq!(residency.call(1), Call::Fetch(0));
        residency.failed(1);
        assert_eq!(residency.call(2), Call::Fetch(0), "its slot is free again");
    }

    #[test]
    fn a_failed_unit_is_fetched_again_when_it_is_called_for() {
        let mut residency = one_class(3, 2, 1);
        assert_eq!(residency.next_ahead(), Some((0, 0)));
        residency.failed(0);
        let next = residency.next_ahead();
        assert_eq!(next, Some((1, 0)), "not the one that failed");
        residency.landed(1);
        assert_eq!(residency.call(0), Call::Fetch(1));
    }

    proptest::proptest! {
        #[test]
        fn any_order_of_calls_is_served_and_no_held_unit_moves(
            classes in proptest::collection::vec((1..5usize, 0..4usize, 1..5usize, proptest::bool::ANY), 1..4),
            units in proptest::collection::vec(0..4usize, 1..24),
            calls in proptest::collection::vec((proptest::prelude::any::<proptest::sample::Index>(), 0..5u8), 1..200),
        ) {
            let shared = |&(slots, ahead, slot_bytes, shares): &(usize, usize, usize, bool)| {
                SlotClass { slots, ahead: ahead.min(slots - 1), slot_bytes, shares }
            };
            let classes: Vec<SlotClass> = classes.iter().map(shared).collect();
            let overlaps = overlaps(&layout(&classes));
            let kept: Vec<Class> = classes.iter().map(Into::into).collect();
            let class_of: Vec<usize> = units.iter().map(|class| class % kept.len()).collect();
            let mut residency = Residency::new(class_of.clone(), kept, overlaps.clone());
            let mut held: Vec<(usize, usize)> = Vec::new();
            for (pick, what) in calls {
                let unit = pick.index(class_of.len());
                match what {
                    0 | 1 => match residency.call(unit) {
                        Call::Held(slot) => held.push((unit, slot)),
                        Call::Fetch(_) | Call::Wait => {}
                        Call::Full => assert!(residency.loading_beside(unit).next().is_some()),
                        Call::Stuck => {
                            let is_held = |slot: &usize| held.iter().any(|(_, other)| other == slot || overlaps[*slot].contains(other));
                            let own = (0..overlaps.len()).filter(|slot| residency.slots[*slot].0 == class_of[unit]);
                            assert!(own.clone().all(|slot| is_held(&slot)), "stuck only where all are held");
                        }
                    },
                    2 => if let Some(at) = held.iter().position(|(other, _)| *other == unit) {
                        held.swap_remove(at);
                        assert!(residency.release(unit));
                    },
                    3 => { residency.next_ahead(); }
                    _ => {
                        let landed = residency.loading_beside(unit).next();
                        landed.into_iter().for_each(|landed| residency.landed(landed));
                    }
                }
                for (unit, slot) in &held {
                    assert_eq!(residency.held_in(*unit), Some(*slot), "a held unit stays where it is");
                }
                let mut used: Vec<usize> = Vec::new();
                for (unit, state) in residency.states.iter().enumerate() {
                    if let State::Loading { slot, .. } | State::Ready { slot, .. } = state {
                        assert_eq!(residency.slots[*slot], (class_of[unit], Some(unit)));
                        used.push(*slot);
                    }
                }
                let count = used.len();
                used.sort_unstable();
                used.dedup();
                assert_eq!(used.len(), count, "a slot has one unit");
                for slot in &used {
                    assert!(overlaps[*slot].iter().all(|other| !used.contains(other)), "memory has one unit");
                }
            }
        }
    }
}
