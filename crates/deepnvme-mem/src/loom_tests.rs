//! The hand-over of slots over every interleaving of a few threads. The crate's documentation has the command.
//!
//! Under `loom` waiting never times out, so that a wake-up that gets lost shows as a deadlock.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::any::Any;
use std::sync::Weak;
use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use crate::{Pool, Slot};

const FOREVER: Duration = Duration::from_secs(3600);

/// Stands for the bytes of each slot: `loom` fails the model when two threads touch one without an order between them.
struct Bytes(Vec<UnsafeCell<u32>>);

impl Bytes {
    fn of(pool: &Pool) -> Arc<Self> {
        Arc::new(Self((0..pool.slots()).map(|_| UnsafeCell::new(0)).collect()))
    }

    /// What a holder does to its slot.
    fn change(&self, slot: &Slot) {
        self.0[slot.index()].with_mut(|count| {
            // SAFETY: the holder of the slot is alone with it, which is what the model checks.
            unsafe { *count += 1 }
        });
    }
}

fn pool(slots: usize) -> Pool {
    Pool::new(1, slots, false).unwrap()
}

/// Becomes dead when the arena is freed.
fn watch(pool: &Pool) -> Weak<dyn Any + Send + Sync> {
    pool.arena().0.watch_owner()
}

#[test]
fn loom_one_slot_serves_all_who_wait() {
    loom::model(|| {
        let pool = pool(1);
        let bytes = Bytes::of(&pool);
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let (pool, bytes) = (pool.clone(), Arc::clone(&bytes));
                thread::spawn(move || bytes.change(&pool.take_timeout(FOREVER).unwrap()))
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(pool.free(), 1);
    });
}

#[test]
fn loom_two_returns_wake_two_who_wait() {
    loom::model(|| {
        let pool = pool(2);
        let bytes = Bytes::of(&pool);
        let slots = [pool.try_take().unwrap(), pool.try_take().unwrap()];
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let (pool, bytes) = (pool.clone(), Arc::clone(&bytes));
                thread::spawn(move || {
                    let slot = pool.take_timeout(FOREVER).unwrap();
                    bytes.change(&slot);
                    // Held for good: the other one has to get the other slot.
                    slot
                })
            })
            .collect();
        for slot in slots {
            bytes.change(&slot);
        }
        let held: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert_ne!(held[0].index(), held[1].index());
    });
}

#[test]
fn loom_who_does_not_wait_takes_nothing_from_who_does() {
    loom::model(|| {
        let pool = pool(1);
        let bytes = Bytes::of(&pool);
        let slot = pool.try_take().unwrap();
        let waits = {
            let (pool, bytes) = (pool.clone(), Arc::clone(&bytes));
            thread::spawn(move || bytes.change(&pool.take_timeout(FOREVER).unwrap()))
        };
        let tries = {
            let (pool, bytes) = (pool.clone(), Arc::clone(&bytes));
            thread::spawn(move || pool.try_take().into_iter().for_each(|slot| bytes.change(&slot)))
        };
        drop(slot);
        waits.join().unwrap();
        tries.join().unwrap();
        assert_eq!(pool.free(), 1);
    });
}

#[test]
fn loom_the_last_region_returns_the_slot() {
    loom::model(|| {
        let pool = pool(1);
        let slot = pool.try_take().unwrap();
        let in_flight = slot.region();
        let completes = thread::spawn(move || drop(in_flight));
        drop(slot);
        assert!(pool.take_timeout(FOREVER).is_some());
        completes.join().unwrap();
    });
}

#[test]
fn loom_the_arena_goes_with_the_last_of_them() {
    loom::model(|| {
        let pool = pool(2);
        let arena = watch(&pool);
        let (slot, other) = (pool.try_take().unwrap(), pool.try_take().unwrap());
        let region = other.region();
        let threads = [thread::spawn(move || drop(slot)), thread::spawn(move || drop((other, region)))];
        assert!(arena.upgrade().is_some());
        drop(pool);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(arena.upgrade().is_none());
    });
}
