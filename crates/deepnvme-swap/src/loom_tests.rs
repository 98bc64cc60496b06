//! All interleavings of threads that borrow items while the disk reads and writes them, unless a test bounds them.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread::{self, JoinHandle};

use crate::item_table::{ItemTable, WaitError};
use crate::residency::{Action, BorrowMode, Budgets, Residency};
use crate::slot_allocator::ItemId;

/// Preemptions per thread in the largest model.
const PREEMPTIONS_MAX: usize = 2;

/// An item table whose disk is instant, and the version of each item in memory and on disk.
struct World {
    items: ItemTable<u8>,
    memory: [AtomicU32; 2],
    disk: [AtomicU32; 2],
}

impl World {
    /// Two items on disk, and memory for `slots` of them.
    fn new(slots: usize) -> (Arc<Self>, [ItemId; 2]) {
        let mut residency = Residency::new(slots, Budgets { prefetch_bytes: 0, headroom_bytes: 0 });
        let ids = ["a", "b"].map(|key| residency.add(&key.into(), 1, true));
        let zeros = || [AtomicU32::new(0), AtomicU32::new(0)];
        (Arc::new(Self { items: ItemTable::new(residency), memory: zeros(), disk: zeros() }), ids)
    }

    /// The same, after a change of the first item.
    fn with_a_change(slots: usize) -> (Arc<Self>, [ItemId; 2]) {
        let (world, ids) = Self::new(slots);
        world.add_one(ids[0], 0);
        (world, ids)
    }

    /// Does the planned I/O. Starting and ending it are separate steps, so that other threads can run between them.
    fn run_planned_io(&self) {
        loop {
            let actions = self.items.lock().take_planned();
            if actions.is_empty() {
                return;
            }
            for action in actions {
                match action {
                    Action::Read { id, .. } => {
                        self.memory[id as usize]
                            .store(self.disk[id as usize].load(Ordering::Relaxed), Ordering::Relaxed);
                        self.items.lock().read_completed(id, Ok(1), true);
                    }
                    Action::Write { id, .. } => {
                        self.disk[id as usize]
                            .store(self.memory[id as usize].load(Ordering::Relaxed), Ordering::Relaxed);
                        self.items.lock().write_completed(id, Ok(1));
                    }
                    Action::SlotReserved => {}
                }
            }
            self.items.notify();
        }
    }

    fn borrow(&self, id: ItemId, mode: BorrowMode, thread: u64) -> Result<Option<usize>, WaitError<u8>> {
        self.items.borrow(id, mode, thread, &|| self.run_planned_io(), &mut || false)
    }

    /// Increments an item, which is borrowed exclusively.
    fn add_one(&self, id: ItemId, thread: u64) {
        self.borrow(id, BorrowMode::Exclusive, thread).expect("the borrow succeeds");
        let before = self.memory[id as usize].load(Ordering::Relaxed);
        self.memory[id as usize].store(before + 1, Ordering::Relaxed);
        self.items.end_borrow(id, BorrowMode::Exclusive, thread, true);
        self.run_planned_io();
    }

    fn read(&self, id: ItemId, thread: u64) -> u32 {
        self.borrow(id, BorrowMode::Shared, thread).expect("the borrow succeeds");
        let found = self.memory[id as usize].load(Ordering::Relaxed);
        self.items.end_borrow(id, BorrowMode::Shared, thread, false);
        self.run_planned_io();
        found
    }

    /// Waits until both items are on disk, then returns the versions that the disk has.
    fn flush(&self, thread: u64) -> [u32; 2] {
        self.items
            .flush([0, 1].into_iter(), thread, &|| self.run_planned_io(), &mut || false)
            .expect("the flush succeeds");
        [0, 1].map(|id: usize| self.disk[id].load(Ordering::Relaxed))
    }
}

/// Runs `work` in another thread.
fn spawn<T: 'static>(world: &Arc<World>, work: impl FnOnce(&World) -> T + 'static) -> JoinHandle<T> {
    let world = Arc::clone(world);
    thread::spawn(move || work(&world))
}

/// Checks the interleavings with few preemptions: all of them would take an hour.
fn check_bounded(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS_MAX);
    builder.check(model);
}

#[test]
fn loom_no_increment_is_lost() {
    loom::model(|| {
        let (world, [a, _]) = World::new(1);
        let thread = spawn(&world, move |other| other.add_one(a, 1));
        world.add_one(a, 0);
        thread.join().unwrap();
        assert_eq!(world.read(a, 0), 2);
    });
}

#[test]
fn loom_two_items_take_turns_in_one_slot() {
    // Both items may be evicted.
    check_bounded(|| {
        let (world, [a, b]) = World::new(1);
        let thread = spawn(&world, move |other| other.add_one(b, 1));
        world.add_one(a, 0);
        thread.join().unwrap();
        assert_eq!((world.read(a, 0), world.read(b, 0)), (1, 1), "changes were written before the eviction");
    });
}

#[test]
fn loom_mutual_waits_are_deadlocks() {
    loom::model(|| {
        let (world, [a, b]) = World::new(2);
        world.borrow(a, BorrowMode::Exclusive, 0).expect("it is free");
        let thread = spawn(&world, move |other| {
            other.borrow(b, BorrowMode::Exclusive, 1).expect("it is free");
            let borrowed = other.borrow(a, BorrowMode::Shared, 1);
            if borrowed.is_ok() {
                other.items.end_borrow(a, BorrowMode::Shared, 1, false);
            }
            other.items.end_borrow(b, BorrowMode::Exclusive, 1, true);
            borrowed.is_ok()
        });
        let borrowed = world.borrow(b, BorrowMode::Shared, 0);
        let (mine, is_deadlock) = (borrowed.is_ok(), matches!(borrowed, Err(WaitError::Deadlock { .. })));
        assert!(mine || is_deadlock);
        if mine {
            world.items.end_borrow(b, BorrowMode::Shared, 0, false);
        }
        world.items.end_borrow(a, BorrowMode::Exclusive, 0, true);
        let theirs = thread.join().unwrap();
        assert!(mine || theirs, "one of the two threads succeeds");
    });
}

#[test]
fn loom_a_lone_thread_detects_a_deadlock_at_once() {
    loom::model(|| {
        let (world, [a, b]) = World::new(1);
        world.borrow(a, BorrowMode::Shared, 0).expect("it is free");
        assert!(matches!(
            world.borrow(b, BorrowMode::Shared, 0),
            Err(WaitError::Deadlock { own_borrows: 1, all_borrows: 1, .. })
        ));
        world.items.end_borrow(a, BorrowMode::Shared, 0, false);
        assert_eq!(world.read(b, 0), 0);
    });
}

/// Flushes while another thread changes an item some times.
fn flush_during_changes(changes: u32) {
    let (world, [a, _]) = World::with_a_change(2);
    let thread = spawn(&world, move |other| (0..changes).for_each(|_| other.add_one(a, 1)));
    assert!(world.flush(0)[0] >= 1, "the disk has what was there before the flush");
    thread.join().unwrap();
    assert_eq!(world.flush(0)[0], 1 + changes);
}

#[test]
fn loom_a_flush_during_a_change_ends() {
    loom::model(|| flush_during_changes(1));
}

#[test]
fn loom_a_flush_during_many_changes_ends() {
    check_bounded(|| flush_during_changes(3));
}

#[test]
fn loom_two_flushes_during_a_change_end() {
    check_bounded(|| {
        let (world, [a, _]) = World::with_a_change(2);
        let changes = spawn(&world, move |other| other.add_one(a, 1));
        let flushes = spawn(&world, |other| other.flush(2)[0]);
        assert!(world.flush(0)[0] >= 1);
        assert!(flushes.join().unwrap() >= 1);
        changes.join().unwrap();
    });
}

#[test]
fn loom_a_flush_during_evictions_ends() {
    check_bounded(|| {
        let (world, [a, b]) = World::with_a_change(1);
        let thread = spawn(&world, move |other| {
            other.add_one(b, 1);
            other.read(a, 1)
        });
        assert!(world.flush(0)[0] >= 1);
        assert_eq!(thread.join().unwrap(), 1);
        assert_eq!(world.flush(0), [1, 1]);
    });
}

#[test]
fn loom_a_flush_during_a_put_and_a_prefetch_ends() {
    check_bounded(|| {
        let (world, [a, b]) = World::with_a_change(1);
        let thread = spawn(&world, move |other| {
            other.items.lock().residency.prefetch(b);
            other.run_planned_io();
            other.borrow(a, BorrowMode::Create, 1).expect("the borrow succeeds");
            other.memory[a as usize].store(7, Ordering::Relaxed);
            other.items.end_borrow(a, BorrowMode::Create, 1, true);
            other.run_planned_io();
        });
        assert!([1, 7].contains(&world.flush(0)[0]));
        thread.join().unwrap();
        assert_eq!(world.flush(0)[0], 7);
    });
}

#[test]
fn loom_a_flush_during_a_borrow_without_a_change_and_a_delete_ends() {
    check_bounded(|| {
        let (world, [a, b]) = World::new(2);
        world.add_one(a, 0);
        world.add_one(b, 0);
        let thread = spawn(&world, move |other| {
            other.borrow(a, BorrowMode::Exclusive, 1).expect("the borrow succeeds");
            other.items.end_borrow(a, BorrowMode::Exclusive, 1, false);
            other.run_planned_io();
            other.items.delete(b);
            other.run_planned_io();
        });
        assert_eq!(world.flush(0)[0], 1);
        thread.join().unwrap();
    });
}
