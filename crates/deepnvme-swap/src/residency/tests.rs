//! Every borrow finds the latest bytes, in whatever order reads and writes end or fail.

use std::sync::Arc;

use proptest::prelude::*;

use super::world::{SLOT_BYTES, Step, World, step};
use super::*;
use crate::next_use::NextUseQueue;
use crate::slot_allocator::ItemId;

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn borrows_find_the_latest_bytes(
        steps in prop::collection::vec(step(), 1..160),
        slots in 4_usize..14,
        prefetch in 0_usize..10,
        headroom in 0_usize..10,
        is_cut_short: bool,
    ) {
        let mut world = World::new(slots, prefetch, headroom);
        if is_cut_short {
            world.residency.search_steps_max = 3;
        }
        steps.into_iter().for_each(|step| world.act(step));
        // Without borrows and waiters, every item can be written and borrowed again.
        while !world.held.is_empty() {
            world.release(0, true);
        }
        while !world.waiters.is_empty() {
            world.cancel_waiter(0);
        }
        world.pump();
        world.complete_all();
        world.check_flushes();
        prop_assert!(world.flushes.is_empty(), "these flushes never end: {:?}", world.flushes);
        let items: Vec<(ItemId, bool)> = world.residency.items.iter().map(|(id, item)| (*id, item.is_deleted)).collect();
        for (id, is_deleted) in items {
            prop_assert!(!is_deleted, "{} is deleted and in use by nobody", id);
            if let Some(flush) = world.residency.flush(id) {
                world.pump();
                world.complete_all();
                prop_assert!(world.residency.is_flush_over(flush));
                prop_assert_eq!(world.disk[&id], Some(world.last[&id]));
            }
            if !world.residency.items[&id].on_disk {
                continue;
            }
            world.residency.enqueue_waiter(id, BorrowMode::Shared);
            world.pump();
            world.complete_all();
            let borrowed = world.residency.try_borrow(id, BorrowMode::Shared);
            prop_assert!(matches!(borrowed, BorrowResult::Borrowed(Some(_))), "{:?} of {}", borrowed, id);
            prop_assert_eq!(world.memory[&id], world.last[&id]);
            world.residency.release(id, BorrowMode::Shared, false);
            world.residency.cancel_waiter(id, BorrowMode::Shared);
        }
    }
}

/// Creates and writes equal items. `slots` is the capacity of the arena.
fn filled(items: usize, slots: usize, prefetch: usize, headroom: usize) -> (World, Vec<ItemId>) {
    let mut world = World::new(slots, prefetch, headroom);
    let ids = (0..items)
        .map(|key| {
            world.act(Step::Add { key, bytes: 1 });
            world.complete_all();
            let id = world.id(key).unwrap();
            world.borrow(id, BorrowMode::Create);
            world.cancel_waiter(0);
            world.release(0, true);
            world.pump();
            id
        })
        .collect();
    world.complete_all();
    (world, ids)
}

fn use_one(world: &mut World, id: ItemId, is_dirty: bool) -> bool {
    let was_there = world.residency.location(id) == ItemLocation::Memory;
    if !was_there {
        world.residency.enqueue_waiter(id, BorrowMode::Exclusive);
        world.pump();
        world.complete_all();
        world.residency.cancel_waiter(id, BorrowMode::Exclusive);
    }
    world.borrow(id, BorrowMode::Exclusive);
    world.pump();
    let held = world.held.len() - 1;
    world.release(held, is_dirty);
    world.pump();
    world.complete_all();
    was_there
}

#[test]
fn a_repeating_schedule_is_prefetched_and_partly_stays() {
    let (mut world, ids) = filled(16, 8, 2, 2);
    let keys: Vec<Arc<str>> = (0..16).map(|key| key.to_string().into()).collect();
    world.residency.schedule(NextUseQueue::new(keys, true));
    world.pump();
    world.complete_all();
    for round in 0..4 {
        let evictions = world.residency.evictions;
        for id in &ids {
            let was_there = use_one(&mut world, *id, true);
            assert!(was_there || round == 0, "item {id} was not in memory in round {round}");
        }
        let moved = world.residency.evictions - evictions;
        assert!(round < 2 || moved <= 13, "{moved} of 16 were read again; some stay");
    }
}

#[test]
fn without_a_schedule_eviction_is_lru() {
    let (mut world, ids) = filled(4, 3, 0, 0);
    for id in [0, 1, 2, 0, 1] {
        use_one(&mut world, ids[id], false);
        world.residency.flush(ids[id]);
        world.pump();
        world.complete_all();
    }
    use_one(&mut world, ids[3], false);
    let here = |id: usize| world.residency.location(ids[id]) == ItemLocation::Memory;
    assert_eq!([0, 1, 2, 3].map(here), [true, true, false, true]);
}

#[test]
fn items_that_fit_are_never_written() {
    let (mut world, ids) = filled(4, 8, 2, 2);
    for _ in 0..3 {
        for id in &ids {
            assert!(use_one(&mut world, *id, true));
        }
    }
    assert!(world.disk.is_empty());
}

#[test]
fn a_failed_write_is_retried_for_each_waiter() {
    let (mut world, ids) = filled(3, 2, 0, 0);
    use_one(&mut world, ids[0], true);
    use_one(&mut world, ids[1], true);
    for _ in 0..2 {
        world.residency.enqueue_waiter(ids[2], BorrowMode::Shared);
        world.pump();
        while !world.in_flight.is_empty() {
            world.end(0, false);
            world.pump();
        }
        world.residency.cancel_waiter(ids[2], BorrowMode::Shared);
        assert_eq!(world.residency.try_borrow(ids[2], BorrowMode::Shared), BorrowResult::NeedsSlot);
    }
    assert!(world.residency.next().is_none(), "without waiters, nothing is retried");
    world.residency.enqueue_waiter(ids[2], BorrowMode::Shared);
    world.pump();
    world.complete_all();
    assert!(matches!(world.residency.try_borrow(ids[2], BorrowMode::Shared), BorrowResult::Borrowed(Some(_))));
}

#[test]
fn a_slot_whose_memory_is_lost_is_not_reused() {
    let (mut world, ids) = filled(3, 2, 0, 0);
    let away = *ids.iter().find(|id| world.residency.location(**id) == ItemLocation::Disk).unwrap();
    world.residency.enqueue_waiter(away, BorrowMode::Shared);
    world.pump();
    world.in_flight.clear();
    world.residency.read_completed(away, false, false);
    assert_eq!(world.residency.try_borrow(away, BorrowMode::Shared), BorrowResult::NeedsSlot);
    assert_eq!(world.residency.resident_bytes(), 2 * SLOT_BYTES, "one slot is lost");
}

#[test]
fn a_flush_is_over_although_its_item_changes_again() {
    let (mut world, ids) = filled(1, 2, 0, 0);
    let flush = world.residency.flush(ids[0]).unwrap();
    assert_eq!(world.residency.try_borrow(ids[0], BorrowMode::Exclusive), BorrowResult::IoPending);
    world.pump();
    assert_eq!(world.residency.try_borrow(ids[0], BorrowMode::Exclusive), BorrowResult::IoPending);
    world.complete_all();
    use_one(&mut world, ids[0], true);
    assert!(world.residency.is_flush_over(flush));
}

#[test]
fn a_flush_waits_for_a_change_that_has_begun() {
    let (mut world, ids) = filled(1, 2, 0, 2);
    use_one(&mut world, ids[0], true);
    world.borrow(ids[0], BorrowMode::Exclusive);
    world.release(0, true);
    world.pump();
    assert_eq!(world.in_flight.len(), 1, "early write-back has begun");
    world.borrow(ids[0], BorrowMode::Exclusive);
    let flush = world.residency.flush(ids[0]).unwrap();
    world.complete_all();
    assert!(!world.residency.is_flush_over(flush), "the item is being changed");
    world.release(0, true);
    world.pump();
    world.complete_all();
    assert!(world.residency.is_flush_over(flush));
    assert_eq!(world.disk[&ids[0]], Some(world.last[&ids[0]]));
}
