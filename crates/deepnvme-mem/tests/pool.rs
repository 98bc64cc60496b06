//! Pools: exclusive slots, their return, and waiting for one.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashSet;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use deepnvme_mem::{Pool, Region, RegionMut};

#[test]
fn slots_are_adjacent_and_page_aligned() {
    let pool = Pool::new(5000, 3, false).unwrap();
    assert_eq!((pool.slots(), pool.slot_bytes(), pool.bound_bytes(), pool.free_slots()), (3, 5000, 3 * 8192, 3));
    let arena = pool.arena().addresses();
    assert_eq!((arena.start % 4096, arena.len()), (0, pool.bound_bytes()));
    let slots: Vec<_> = std::iter::from_fn(|| pool.try_take()).collect();
    assert_eq!(slots.len(), 3);
    for slot in &slots {
        assert_eq!((slot.len(), slot.is_empty()), (5000, false));
        assert_eq!(slot.region().addr(), arena.start + slot.index() * 8192);
    }
    assert_eq!(slots.iter().map(|slot| slot.index()).collect::<HashSet<_>>().len(), 3);
    assert_eq!(pool.free_slots(), 0);
}

#[test]
fn the_last_returned_slot_is_taken_first() {
    let pool = Pool::new(4096, 4, false).unwrap();
    let (first, second) = (pool.try_take().unwrap(), pool.try_take().unwrap());
    let index = first.index();
    drop(first);
    assert_eq!(pool.try_take().unwrap().index(), index, "its bytes may still be cached");
    drop(second);
    assert_eq!(pool.free_slots(), 4);
}

#[test]
fn a_slot_stays_taken_while_a_region_of_it_is_alive() {
    let pool = Pool::new(4096, 1, false).unwrap();
    let slot = pool.try_take().unwrap();
    let in_flight = slot.region().slice(100..200);
    drop(slot);
    assert!(pool.try_take().is_none(), "the kernel may still write there");
    drop(in_flight);
    assert!(pool.try_take().is_some());
}

#[test]
fn bytes_are_accessible_when_nothing_is_in_flight() {
    let pool = Pool::new(4096, 1, false).unwrap();
    let mut slot = pool.try_take().unwrap();
    slot.as_mut_slice()[7] = 7;
    drop(slot.region());
    assert_eq!(slot.as_slice()[7], 7);
}

#[test]
#[should_panic(expected = "borrowed while a region of it is alive")]
fn bytes_are_inaccessible_while_a_region_is_alive() {
    let mut slot = Pool::new(4096, 1, false).unwrap().try_take().unwrap();
    let _in_flight = slot.region();
    let _ = slot.as_mut_slice();
}

#[test]
fn gather_and_scatter_move_bytes_through_a_slot() {
    let pool = Pool::new(100, 1, false).unwrap();
    let mut slot = pool.try_take().unwrap();
    slot.gather(90, &Region::from_vec((0..50).collect()), 20, 10);
    slot.gather(100, &Region::from_vec(vec![]), 0, 0);
    let target = RegionMut::from_vec(vec![0; 12]);
    slot.scatter(88, &target, 1, 11);
    let mut bytes = [0; 12];
    target.region().copy_to_slice(0, &mut bytes);
    assert_eq!(bytes, [0, 0, 0, 20, 21, 22, 23, 24, 25, 26, 27, 28]);
}

#[test]
#[should_panic(expected = "11 bytes at 90 are outside a slot of 100 bytes")]
fn gathering_past_the_end_of_a_slot_is_refused() {
    let mut slot = Pool::new(100, 1, false).unwrap().try_take().unwrap();
    slot.gather(90, &Region::from_vec(vec![0; 50]), 0, 11);
}

#[test]
#[should_panic(expected = "10 bytes at 41 are outside a region of 50 bytes")]
fn gathering_past_the_end_of_a_region_is_refused() {
    let mut slot = Pool::new(100, 1, false).unwrap().try_take().unwrap();
    slot.gather(0, &Region::from_vec(vec![0; 50]), 41, 10);
}

#[test]
fn waiting_ends_with_a_slot_or_the_timeout() {
    let pool = Pool::new(4096, 1, false).unwrap();
    let slot = pool.take_timeout(Duration::ZERO).unwrap();
    let began = Instant::now();
    assert!(pool.take_timeout(Duration::from_millis(30)).is_none());
    assert!(began.elapsed() >= Duration::from_millis(30));
    assert!(pool.take_timeout(Duration::ZERO).is_none());

    let waiter = thread::spawn(move || pool.take_timeout(Duration::MAX).unwrap().index());
    thread::sleep(Duration::from_millis(20));
    drop(slot);
    assert_eq!(waiter.join().unwrap(), 0);
}

#[test]
fn slots_outlive_their_pool() {
    let pool = Pool::new(1 << 16, 2, false).unwrap();
    let mut slot = pool.try_take().unwrap();
    let arena = pool.arena();
    drop(pool);
    slot.as_mut_slice().fill(5);
    let region = slot.region();
    drop(slot);
    let mut bytes = [0; 3];
    region.copy_to_slice((1 << 16) - 3, &mut bytes);
    assert_eq!(bytes, [5; 3]);
    drop(region);
    assert_eq!(arena.addresses().len(), 2 << 16);
}

#[test]
fn no_slot_has_two_holders() {
    const SLOTS: usize = 3;
    const ROUNDS: usize = if cfg!(miri) { 4 } else { 500 };
    let pool = Pool::new(4096, SLOTS, false).unwrap();
    let holders: [AtomicUsize; SLOTS] = Default::default();
    let (sender, receiver) = mpsc::channel::<Region>();
    thread::scope(|scope| {
        // Regions are dropped on another thread than slots, as on I/O completion.
        scope.spawn(move || receiver.into_iter().for_each(drop));
        for thread in 0..6_u8 {
            let (pool, holders, sender) = (&pool, &holders, sender.clone());
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let mut slot = pool.take_timeout(Duration::from_secs(60)).unwrap();
                    let index = slot.index();
                    assert_eq!(holders[index].fetch_add(1, Ordering::SeqCst), 0);
                    slot.as_mut_slice().fill(thread);
                    assert!(slot.as_slice().iter().all(|byte| *byte == thread));
                    holders[index].fetch_sub(1, Ordering::SeqCst);
                    if round.is_multiple_of(3) {
                        sender.send(slot.region()).unwrap();
                    }
                }
            });
        }
        drop(sender);
    });
    assert_eq!(pool.free_slots(), SLOTS);
}

#[test]
fn an_empty_pool_has_no_slots() {
    let pool = Pool::new(4096, 0, true).unwrap();
    assert_eq!((pool.slots(), pool.free_slots(), pool.bound_bytes()), (0, 0, 0));
    assert!(pool.try_take().is_none() && pool.take_timeout(Duration::from_millis(1)).is_none());
    assert!(pool.arena().addresses().is_empty());
}

#[test]
#[cfg_attr(miri, ignore = "miri has no kernel that could refuse")]
fn absurd_pools_are_errors() {
    assert_eq!(Pool::new(0, 4, false).unwrap_err().kind(), ErrorKind::InvalidInput);
    for (slot_bytes, slots) in [(usize::MAX, 1), (1 << 40, 1 << 40), (1, usize::MAX), (1 << 62, 1)] {
        assert_eq!(Pool::new(slot_bytes, slots, false).unwrap_err().kind(), ErrorKind::OutOfMemory);
    }
}

#[test]
fn debug_output_shows_the_free_slots() {
    let pool = Pool::new(4096, 2, false).unwrap();
    let _slot = pool.try_take();
    assert_eq!(format!("{pool:?}"), "Pool(1 of 2 slots of 4096 bytes free, NotRequested)");
}
