//! Interleavings of items that change hands between threads, while the disk reads and writes them: all of them, but where
//! a test says how many.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;

use crate::item_table::{Desk, Refusal};
use crate::residency::{Action, Bounds, Mode, Residency};
use crate::slot_allocator::Id;

/// How often a thread may be interrupted in the largest model.
const PREEMPTIONS_MAX: usize = 2;

/// A desk whose disk is at once done with everything, and what memory and disk have of each item.
struct World {
    desk: Desk<u8>,
    memory: [AtomicU32; 2],
    disk: [AtomicU32; 2],
}

impl World {
    /// Two items on disk, in memory for so many.
    fn new(places: usize) -> (Arc<Self>, [Id; 2]) {
        let mut residency = Residency::new(places, Bounds { ahead_bytes: 0, reserve_bytes: 0 });
        let ids = ["a", "b"].map(|key| residency.add(&key.into(), 1, true));
        let zeros = || [AtomicU32::new(0), AtomicU32::new(0)];
        (Arc::new(Self { desk: Desk::new(residency), memory: zeros(), disk: zeros() }), ids)
    }

    /// What the disk does: begun by one thread, and perhaps ended while others look on.
    fn advance(&self) {
        loop {
            let actions = self.desk.lock().take_decided();
            if actions.is_empty() {
                return;
            }
            for action in actions {
                match action {
                    Action::Read { id, .. } => {
                        self.memory[id as usize]
                            .store(self.disk[id as usize].load(Ordering::Relaxed), Ordering::Relaxed);
                        self.desk.lock().landed(id, Ok(1), true);
                    }
                    Action::Write { id, .. } => {
                        self.disk[id as usize]
                            .store(self.memory[id as usize].load(Ordering::Relaxed), Ordering::Relaxed);
                        self.desk.lock().written(id, Ok(1));
                    }
                    Action::Placed => {}
                }
            }
            self.desk.notify();
        }
    }

    fn take(&self, id: Id, mode: Mode, who: u64) -> Result<Option<usize>, Refusal<u8>> {
        self.desk.take(id, mode, who, &|| self.advance(), &mut || false)
    }

    /// One more, by whoever has the item alone.
    fn add_one(&self, id: Id, who: u64) {
        self.take(id, Mode::Exclusive, who).expect("it is lent");
        let before = self.memory[id as usize].load(Ordering::Relaxed);
        self.memory[id as usize].store(before + 1, Ordering::Relaxed);
        self.desk.give_back(id, Mode::Exclusive, who, true);
        self.advance();
    }

    fn read(&self, id: Id, who: u64) -> u32 {
        self.take(id, Mode::Shared, who).expect("it is lent");
        let found = self.memory[id as usize].load(Ordering::Relaxed);
        self.desk.give_back(id, Mode::Shared, who, false);
        self.advance();
        found
    }
}

#[test]
fn loom_nothing_that_two_threads_add_is_lost() {
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
fn loom_two_items_take_turns_in_one_place() {
    // Each of the two may be made to leave; all interleavings of that would take an hour.
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(PREEMPTIONS_MAX);
    model.check(|| {
        let (world, [a, b]) = World::new(1);
        let other = Arc::clone(&world);
        let thread = thread::spawn(move || other.add_one(b, 1));
        world.add_one(a, 0);
        thread.join().unwrap();
        assert_eq!((world.read(a, 0), world.read(b, 0)), (1, 1), "what was changed was written before it left");
    });
}

#[test]
fn loom_who_waits_for_each_other_is_told() {
    loom::model(|| {
        let (world, [a, b]) = World::new(2);
        world.take(a, Mode::Exclusive, 0).expect("nobody has it");
        let other = Arc::clone(&world);
        let thread = thread::spawn(move || {
            other.take(b, Mode::Exclusive, 1).expect("nobody has it");
            let taken = other.take(a, Mode::Shared, 1);
            if taken.is_ok() {
                other.desk.give_back(a, Mode::Shared, 1, false);
            }
            other.desk.give_back(b, Mode::Exclusive, 1, true);
            taken.is_ok()
        });
        let taken = world.take(b, Mode::Shared, 0);
        let (mine, is_deadlock) = (taken.is_ok(), matches!(taken, Err(Refusal::Deadlock(..))));
        assert!(mine || is_deadlock);
        if mine {
            world.desk.give_back(b, Mode::Shared, 0, false);
        }
        world.desk.give_back(a, Mode::Exclusive, 0, true);
        let theirs = thread.join().unwrap();
        assert!(mine || theirs, "one of the two gets what it wants");
    });
}

#[test]
fn loom_who_is_alone_is_told_at_once() {
    loom::model(|| {
        let (world, [a, b]) = World::new(1);
        world.take(a, Mode::Shared, 0).expect("nobody has it");
        assert!(matches!(world.take(b, Mode::Shared, 0), Err(Refusal::Deadlock(_, 1, 1))));
        world.desk.give_back(a, Mode::Shared, 0, false);
        assert_eq!(world.read(b, 0), 0);
    });
}
