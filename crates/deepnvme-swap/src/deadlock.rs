//! Detects waits that can never end, from the borrows and waits of all threads. This module does no I/O.

use std::collections::{HashMap, HashSet};

use crate::slot_allocator::ItemId;

/// Identifies a thread.
pub(crate) type ThreadNumber = u64;

/// The reason why a thread waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WaitingFor {
    /// All borrows of an item have to end.
    Item(ItemId),
    /// An item needs memory, which any borrow that ends may free.
    Memory(ItemId),
    /// A read or write of an item, or a thread that creates it, has to finish.
    Io(ItemId),
    /// The disk space of deleted items has to be freed, which needs no thread that waits here.
    DiskSpace,
}

/// The borrows and waits of all threads.
#[derive(Debug, Default)]
pub(crate) struct DeadlockDetector {
    borrows: HashMap<ItemId, Vec<ThreadNumber>>,
    waiting: HashMap<ThreadNumber, WaitingFor>,
}

impl DeadlockDetector {
    pub(crate) fn record_borrow(&mut self, id: ItemId, thread: ThreadNumber) {
        self.borrows.entry(id).or_default().push(thread);
    }

    pub(crate) fn release(&mut self, id: ItemId, thread: ThreadNumber) {
        if let Some(holders) = self.borrows.get_mut(&id) {
            if let Some(place) = holders.iter().position(|holder| *holder == thread) {
                holders.swap_remove(place);
            }
            if holders.is_empty() {
                self.borrows.remove(&id);
            }
        }
    }

    pub(crate) fn record_wait(&mut self, thread: ThreadNumber, waiting_for: WaitingFor) {
        self.waiting.insert(thread, waiting_for);
    }

    pub(crate) fn stop_waiting(&mut self, thread: ThreadNumber) {
        self.waiting.remove(&thread);
    }

    /// The borrows of a thread, and all borrows.
    pub(crate) fn count_borrows(&self, thread: ThreadNumber) -> (usize, usize) {
        let all = self.borrows.values().flatten();
        all.fold((0, 0), |(own, all), holder| (own + usize::from(*holder == thread), all + 1))
    }

    /// Whether a waiting thread would wait forever, because all threads that could unblock it are in the same
    /// position. Threads that do not wait here make progress, and so does the disk.
    ///
    /// `is_wait_over` tells whether a wait for an item's slot or bytes is over: it has a slot by now, or never will.
    pub(crate) fn is_deadlocked(
        &self,
        thread: ThreadNumber,
        disk_is_busy: bool,
        is_wait_over: impl Fn(ItemId) -> bool,
    ) -> bool {
        if disk_is_busy {
            return false;
        }
        // Grows by the threads that those in it can unblock, until it contains the thread or stays as it is.
        let mut can_proceed: HashSet<ThreadNumber> = HashSet::new();
        loop {
            let before = can_proceed.len();
            for (waiter, waiting_for) in &self.waiting {
                if self.can_be_unblocked(*waiter, *waiting_for, &can_proceed, &is_wait_over) {
                    can_proceed.insert(*waiter);
                }
            }
            if can_proceed.contains(&thread) || !self.waiting.contains_key(&thread) {
                return false;
            }
            if can_proceed.len() == before {
                return true;
            }
        }
    }

    /// Whether a waiter's wait ends, given the waiting threads whose wait ends.
    fn can_be_unblocked(
        &self,
        waiter: ThreadNumber,
        waiting_for: WaitingFor,
        can_proceed: &HashSet<ThreadNumber>,
        is_wait_over: impl Fn(ItemId) -> bool,
    ) -> bool {
        let proceeds = |other: &ThreadNumber| !self.waiting.contains_key(other) || can_proceed.contains(other);
        match waiting_for {
            WaitingFor::DiskSpace => true,
            WaitingFor::Io(id) | WaitingFor::Memory(id) if is_wait_over(id) => true,
            WaitingFor::Io(id) => {
                let creates =
                    |other: &ThreadNumber| *other != waiter && self.waiting.get(other) == Some(&WaitingFor::Memory(id));
                self.waiting.keys().filter(|other| creates(other)).all(proceeds)
            }
            WaitingFor::Item(id) => self.borrows.get(&id).is_none_or(|holders| holders.iter().all(proceeds)),
            // A waiter may have its slot already without having woken up; it will return it.
            WaitingFor::Memory(_) => {
                let others = self.borrows.values().flatten().chain(self.waiting.keys());
                others.filter(|other| **other != waiter).any(proceeds)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detector(borrows: &[(ItemId, ThreadNumber)], waiting: &[(ThreadNumber, WaitingFor)]) -> DeadlockDetector {
        let mut detector = DeadlockDetector::default();
        borrows.iter().for_each(|(id, thread)| detector.record_borrow(*id, *thread));
        waiting.iter().for_each(|(thread, waiting_for)| detector.record_wait(*thread, *waiting_for));
        detector
    }

    #[test]
    fn waiting_for_a_borrow_of_ones_own_is_a_deadlock() {
        let mut detector = detector(&[(1, 7)], &[(7, WaitingFor::Item(1))]);
        assert!(detector.is_deadlocked(7, false, |_| false) && !detector.is_deadlocked(7, true, |_| false));
        detector.record_wait(7, WaitingFor::Memory(5));
        assert!(detector.is_deadlocked(7, false, |_| false));
        detector.stop_waiting(7);
        assert!(!detector.is_deadlocked(7, false, |_| false));
        assert_eq!(detector.count_borrows(7), (1, 1));
    }

    #[test]
    fn a_running_thread_prevents_a_deadlock() {
        let detector = detector(&[(1, 7), (2, 8)], &[(7, WaitingFor::Memory(5))]);
        assert!(!detector.is_deadlocked(7, false, |_| false));
    }

    #[test]
    fn cycles_are_deadlocks_and_chains_are_not() {
        let circle = detector(&[(1, 7), (2, 8)], &[(7, WaitingFor::Item(2)), (8, WaitingFor::Item(1))]);
        assert!(circle.is_deadlocked(7, false, |_| false) && circle.is_deadlocked(8, false, |_| false));
        let line = detector(&[(1, 7), (2, 8), (3, 9)], &[(7, WaitingFor::Item(2)), (8, WaitingFor::Item(3))]);
        assert!(!line.is_deadlocked(7, false, |_| false));
        let both = detector(&[(1, 7), (2, 8)], &[(7, WaitingFor::Memory(5)), (8, WaitingFor::Memory(5))]);
        assert!(both.is_deadlocked(7, false, |_| false) && both.is_deadlocked(8, false, |_| false));
        assert!(!both.is_deadlocked(7, false, |id| id == 5), "7 has its slot and has not woken up");
        let mut one = detector(&[], &[(7, WaitingFor::Memory(5)), (8, WaitingFor::Memory(6))]);
        assert!(
            one.is_deadlocked(8, false, |_| false) && !one.is_deadlocked(8, false, |id| id == 5),
            "7 will return its item"
        );
        one.stop_waiting(7);
        let put = detector(&[(1, 7)], &[(7, WaitingFor::Memory(5)), (8, WaitingFor::Io(5))]);
        assert!(put.is_deadlocked(7, false, |_| false), "8 waits for the item that 7 creates");
        let read = detector(&[(1, 7)], &[(7, WaitingFor::Memory(5)), (8, WaitingFor::Io(6))]);
        assert!(!read.is_deadlocked(7, false, |id| id == 6), "8 has been read and has not woken up");
        let shared = detector(&[(1, 7), (1, 8)], &[(7, WaitingFor::Item(1))]);
        assert!(shared.is_deadlocked(7, false, |_| false), "it waits for its own borrow");
    }

    #[test]
    fn returned_items_block_nobody() {
        let mut detector = detector(&[(1, 7), (1, 7)], &[(8, WaitingFor::Item(1)), (7, WaitingFor::Item(9))]);
        detector.record_borrow(9, 8);
        assert!(detector.is_deadlocked(8, false, |_| false));
        detector.release(1, 7);
        assert!(detector.is_deadlocked(8, false, |_| false), "it is borrowed twice");
        detector.release(1, 7);
        assert!(!detector.is_deadlocked(8, false, |_| false) && !detector.is_deadlocked(7, false, |_| false));
    }
}
