//! Slots passed between threads, over every interleaving. The crate's documentation has the command.
//!
//! Waits never time out under `loom`, so a lost wake-up shows as a deadlock.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::any::Any;
use std::sync::Weak;
use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use crate::{Pool, Slot};

const FOREVER: Duration = Duration::from_secs(3600);

/// Represents the bytes of each slot. `loom` reports unsynchronised access by two threads.
struct Bytes(Vec<UnsafeCell<u32>>);

impl Bytes {
    fn of(pool: &Pool) -> Arc<Self> {
        Arc::new(Self((0..pool.slots()).map(|_| UnsafeCell::new(0)).collect()))
    }

    /// Modifies the slot as its holder.
    fn change(&self, slot: &Slot) {
        self.0[slot.index()].with_mut(|count| {
            // SAFETY: the holder has exclusive access, which the model checks.
            unsafe { *count += 1 }
        });
    }
}

fn pool(slots: usize) -> Pool {
    Pool::new(1, slots, false).unwrap()
}

/// Returns a reference that dies with the arena.
fn weak_arena(pool: &Pool) -> Weak<dyn Any + Send + Sync> {
    pool.arena().raw.downgrade_owner()
}

#[test]
fn loom_one_slot_serves_all_waiters() {
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
        assert_eq!(pool.free_slots(), 1);
    });
}

#[test]
fn loom_two_returns_wake_two_waiters() {
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
                    // Keep it: the other thread must get the other slot.
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
fn loom_try_take_does_not_lose_a_wake_up() {
    loom::model(|| {
        let pool = pool(1);
        let bytes = Bytes::of(&pool);
        let slot = pool.try_take().unwrap();
        let waiter = {
            let (pool, bytes) = (pool.clone(), Arc::clone(&bytes));
            thread::spawn(move || bytes.change(&pool.take_timeout(FOREVER).unwrap()))
        };
        let taker = {
            let (pool, bytes) = (pool.clone(), Arc::clone(&bytes));
            thread::spawn(move || pool.try_take().into_iter().for_each(|slot| bytes.change(&slot)))
        };
        drop(slot);
        waiter.join().unwrap();
        taker.join().unwrap();
        assert_eq!(pool.free_slots(), 1);
    });
}

#[test]
fn loom_the_last_region_returns_the_slot() {
    loom::model(|| {
        let pool = pool(1);
        let slot = pool.try_take().unwrap();
        let in_flight = slot.region();
        let completer = thread::spawn(move || drop(in_flight));
        drop(slot);
        assert!(pool.take_timeout(FOREVER).is_some());
        completer.join().unwrap();
    });
}

#[test]
fn loom_the_last_holder_frees_the_arena() {
    loom::model(|| {
        let pool = pool(2);
        let arena = weak_arena(&pool);
        let (slot, other) = (pool.try_take().unwrap(), pool.try_take().unwrap());
        let region = other.region();
        let threads = [thread::spawn(move || drop(slot)), thread::spawn(move || drop((other, region)))];
        assert!(arena.upgrade().is_some());
        drop(pool);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(arena.upgrade().is_none());
    });
}
