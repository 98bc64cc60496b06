//! Who holds what, who waits for what, and whether waiting can end: pure.

use std::collections::{HashMap, HashSet};

use crate::slot_allocator::Id;

/// A thread's number.
pub(crate) type Who = u64;

/// What a thread waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum On {
    /// That all who hold an item return it.
    Item(Id),
    /// Room in memory for an item, which anybody who holds something may make by returning it.
    Memory(Id),
    /// What the disk does for an item, or somebody who puts it.
    Io(Id),
}

/// The threads of a swapper.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    holds: HashMap<Id, Vec<Who>>,
    waiting: HashMap<Who, On>,
}

impl Waits {
    pub(crate) fn hold(&mut self, id: Id, who: Who) {
        self.holds.entry(id).or_default().push(who);
    }

    pub(crate) fn release(&mut self, id: Id, who: Who) {
        if let Some(holders) = self.holds.get_mut(&id) {
            if let Some(place) = holders.iter().position(|holder| *holder == who) {
                holders.swap_remove(place);
            }
            if holders.is_empty() {
                self.holds.remove(&id);
            }
        }
    }

    pub(crate) fn wait(&mut self, who: Who, on: On) {
        self.waiting.insert(who, on);
    }

    pub(crate) fn go_on(&mut self, who: Who) {
        self.waiting.remove(&who);
    }

    /// How many lends a thread has, and how many there are in all.
    pub(crate) fn count(&self, who: Who) -> (usize, usize) {
        let all = self.holds.values().flatten();
        all.fold((0, 0), |(own, all), holder| (own + usize::from(*holder == who), all + 1))
    }

    /// Whether a thread that waits would do so for ever: all who could let it go on are in the same position. Threads that
    /// do not wait here will go on, and the disk always answers.
    ///
    /// `is_settled` says of an item whether it has a place by now.
    pub(crate) fn is_hopeless(&self, who: Who, disk_is_busy: bool, is_settled: impl Fn(Id) -> bool) -> bool {
        if disk_is_busy {
            return false;
        }
        let mut going: HashSet<Who> = HashSet::new();
        let goes = |other: &Who, going: &HashSet<Who>| !self.waiting.contains_key(other) || going.contains(other);
        loop {
            let before = going.len();
            for (waiter, on) in &self.waiting {
                let can = match on {
                    On::Io(id) => {
                        let puts = |other: &Who| *other != *waiter && self.waiting.get(other) == Some(&On::Memory(*id));
                        is_settled(*id)
                            || self.waiting.keys().filter(|other| puts(other)).all(|other| goes(other, &going))
                    }
                    On::Item(id) => self.holds.get(id).is_none_or(|them| them.iter().all(|other| goes(other, &going))),
                    On::Memory(id) if is_settled(*id) => true,
                    // Also who waits may have room that it will hold, and return: it has only not woken up yet.
                    On::Memory(_) => {
                        let others = self.holds.values().flatten().chain(self.waiting.keys());
                        others.filter(|other| *other != waiter).any(|other| goes(other, &going))
                    }
                };
                if can {
                    going.insert(*waiter);
                }
            }
            if going.contains(&who) || !self.waiting.contains_key(&who) {
                return false;
            }
            if going.len() == before {
                return true;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(holds: &[(Id, Who)], waiting: &[(Who, On)]) -> Waits {
        let mut waits = Waits::default();
        holds.iter().for_each(|(id, who)| waits.hold(*id, *who));
        waiting.iter().for_each(|(who, on)| waits.wait(*who, *on));
        waits
    }

    #[test]
    fn who_waits_for_itself_waits_for_ever() {
        let mut waits = waits(&[(1, 7)], &[(7, On::Item(1))]);
        assert!(waits.is_hopeless(7, false, |_| false) && !waits.is_hopeless(7, true, |_| false));
        waits.wait(7, On::Memory(5));
        assert!(waits.is_hopeless(7, false, |_| false));
        waits.go_on(7);
        assert!(!waits.is_hopeless(7, false, |_| false));
        assert_eq!(waits.count(7), (1, 1));
    }

    #[test]
    fn another_thread_that_runs_is_waited_for() {
        let waits = waits(&[(1, 7), (2, 8)], &[(7, On::Memory(5))]);
        assert!(!waits.is_hopeless(7, false, |_| false));
    }

    #[test]
    fn a_circle_is_seen_and_a_line_is_not_one() {
        let circle = waits(&[(1, 7), (2, 8)], &[(7, On::Item(2)), (8, On::Item(1))]);
        assert!(circle.is_hopeless(7, false, |_| false) && circle.is_hopeless(8, false, |_| false));
        let line = waits(&[(1, 7), (2, 8), (3, 9)], &[(7, On::Item(2)), (8, On::Item(3))]);
        assert!(!line.is_hopeless(7, false, |_| false));
        let both = waits(&[(1, 7), (2, 8)], &[(7, On::Memory(5)), (8, On::Memory(5))]);
        assert!(both.is_hopeless(7, false, |_| false) && both.is_hopeless(8, false, |_| false));
        assert!(!both.is_hopeless(7, false, |id| id == 5), "the other one has it and has not woken up");
        let mut one = waits(&[], &[(7, On::Memory(5)), (8, On::Memory(6))]);
        assert!(one.is_hopeless(8, false, |_| false) && !one.is_hopeless(8, false, |id| id == 5), "7 will return it");
        one.go_on(7);
        let put = waits(&[(1, 7)], &[(7, On::Memory(5)), (8, On::Io(5))]);
        assert!(put.is_hopeless(7, false, |_| false), "8 waits for what 7 puts");
        let read = waits(&[(1, 7)], &[(7, On::Memory(5)), (8, On::Io(6))]);
        assert!(!read.is_hopeless(7, false, |id| id == 6), "8 has been read and has not woken up");
        let shared = waits(&[(1, 7), (1, 8)], &[(7, On::Item(1))]);
        assert!(shared.is_hopeless(7, false, |_| false), "it holds what it waits for");
    }

    #[test]
    fn what_was_returned_is_held_no_more() {
        let mut waits = waits(&[(1, 7), (1, 7)], &[(8, On::Item(1)), (7, On::Item(9))]);
        waits.hold(9, 8);
        assert!(waits.is_hopeless(8, false, |_| false));
        waits.release(1, 7);
        assert!(waits.is_hopeless(8, false, |_| false), "it was lent twice");
        waits.release(1, 7);
        assert!(!waits.is_hopeless(8, false, |_| false) && !waits.is_hopeless(7, false, |_| false));
    }
}
