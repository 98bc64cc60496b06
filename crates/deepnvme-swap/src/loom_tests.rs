//! All interleavings of threads that borrow items while the disk reads and writes them, unless a test bounds them.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;

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

    /// Does the planned I/O. Starting and ending it are separate steps, so that other threads can run between them.
    fn pump(&self) {
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
        self.items.borrow(id, mode, thread, &|| self.pump(), &mut || false)
    }

    /// Increments an item, which is borrowed exclusively.
    fn add_one(&self, id: ItemId, thread: u64) {
        self.borrow(id, BorrowMode::Exclusive, thread).expect("the borrow succeeds");
        let before = self.memory[id as usize].load(Ordering::Relaxed);
        self.memory[id as usize].store(before + 1, Ordering::Relaxed);
        self.items.end_borrow(id, BorrowMode::Exclusive, thread, true);
        self.pump();
    }

    fn read(&self, id: ItemId, thread: u64) -> u32 {
        self.borrow(id, BorrowMode::Shared, thread).expect("the borrow succeeds");
        let found = self.memory[id as usize].load(Ordering::Relaxed);
        self.items.end_borrow(id, BorrowMode::Shared, thread, false);
        self.pump();
        found
    }
}

#[test]
fn loom_no_increment_is_lost() {
    loom::model(|| {
        let (world, [a, _]) = World::new(1);
        let other = Arc::clone(&world);
        let thread = thread::spawn(move || other.add_one(a, 1));
        world.add_one(a, 0);
        thread.join().unwrap();
        assert_eq!(world.read(a, 0), 2);
    });
}

#[test]
fn loom_two_items_take_turns_in_one_slot() {
    // Both items may be evicted; all interleavings would take an hour.
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(PREEMPTIONS_MAX);
    model.check(|| {
        let (world, [a, b]) = World::new(1);
        let other = Arc::clone(&world);
        let thread = thread::spawn(move || other.add_one(b, 1));
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
        let other = Arc::clone(&world);
        let thread = thread::spawn(move || {
            other.borrow(b, BorrowMode::Exclusive, 1).expect("it is free");
            let borrowed = other.borrow(a, BorrowMode::Shared, 1);
            if borrowed.is_ok() {
                other.items.end_borrow(a, BorrowMode::Shared, 1, false);
            }
            other.items.end_borrow(b, BorrowMode::Exclusive, 1, true);
            borrowed.is_ok()
        });
        let borrowed = world.borrow(b, BorrowMode::Shared, 0);
        let (mine, is_deadlock) = (borrowed.is_ok(), matches!(borrowed, Err(WaitError::Deadlock(..))));
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
        assert!(matches!(world.borrow(b, BorrowMode::Shared, 0), Err(WaitError::Deadlock(_, 1, 1))));
        world.items.end_borrow(a, BorrowMode::Shared, 0, false);
        assert_eq!(world.read(b, 0), 0);
    });
}
