//! Every borrow finds the latest bytes, in whatever order reads and writes end or fail.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;

use super::item::ItemState;
use super::*;
use crate::next_use::NextUseQueue;
use crate::slot_allocator::ItemId;

const SLOT_BYTES: usize = 4;

#[derive(Clone, Debug)]
enum Step {
    Add { key: usize, bytes: usize },
    Borrow { key: usize, mode: usize },
    Release { which: usize, is_dirty: bool },
    Wait { key: usize, is_create: bool },
    CancelWait { which: usize },
    Delete { key: usize },
    Prefetch { key: usize },
    Flush { key: usize },
    End { which: usize, is_good: bool },
    Schedule { keys: Vec<usize>, repeats: bool },
}

fn step() -> impl Strategy<Value = Step> {
    let key = 0_usize..7;
    prop_oneof![
        2 => (key.clone(), 1_usize..5).prop_map(|(key, bytes)| Step::Add { key, bytes }),
        5 => (key.clone(), 0_usize..5).prop_map(|(key, mode)| Step::Borrow { key, mode }),
        5 => (any::<usize>(), any::<bool>()).prop_map(|(which, is_dirty)| Step::Release { which, is_dirty }),
        4 => (key.clone(), any::<bool>()).prop_map(|(key, is_create)| Step::Wait { key, is_create }),
        3 => any::<usize>().prop_map(|which| Step::CancelWait { which }),
        1 => key.clone().prop_map(|key| Step::Delete { key }),
        1 => key.clone().prop_map(|key| Step::Prefetch { key }),
        1 => key.clone().prop_map(|key| Step::Flush { key }),
        6 => (any::<usize>(), 0..10).prop_map(|(which, luck)| Step::End { which, is_good: luck > 1 }),
        1 => (prop::collection::vec(key, 0..9), any::<bool>()).prop_map(|(keys, repeats)| Step::Schedule { keys, repeats }),
    ]
}

/// A simple model: the latest version of each item, and the versions in memory and on disk.
struct World {
    residency: Residency,
    last: BTreeMap<ItemId, u32>,
    memory: BTreeMap<ItemId, u32>,
    /// `None` if a write failed half-way.
    disk: BTreeMap<ItemId, Option<u32>>,
    held: Vec<(ItemId, BorrowMode)>,
    waiters: Vec<(ItemId, BorrowMode)>,
    in_flight: Vec<(Action, u32)>,
    slots: BTreeMap<ItemId, std::ops::Range<usize>>,
    /// Flushes that are not over, with the version that each has to write.
    flushes: Vec<(PendingFlush, u32)>,
    versions: u32,
}

impl World {
    fn new(slots: usize, prefetch: usize, headroom: usize) -> Self {
        let budgets = Budgets { prefetch_bytes: prefetch * SLOT_BYTES, headroom_bytes: headroom * SLOT_BYTES };
        Self {
            residency: Residency::new(slots * SLOT_BYTES, budgets),
            last: BTreeMap::new(),
            memory: BTreeMap::new(),
            disk: BTreeMap::new(),
            held: Vec::new(),
            waiters: Vec::new(),
            in_flight: Vec::new(),
            slots: BTreeMap::new(),
            flushes: Vec::new(),
            versions: 0,
        }
    }

    fn id(&self, key: usize) -> Option<ItemId> {
        self.residency.find(&key.to_string())
    }

    /// Does all actions that the residency plans.
    fn pump(&mut self) {
        for _ in 0..1000 {
            let Some(action) = self.residency.next() else { return self.check() };
            self.check_flushes();
            match action {
                Action::Read { id, slot } => {
                    assert_eq!(self.disk[&id], Some(self.last[&id]), "the disk has the latest version");
                    self.slots.insert(id, slot..slot + self.residency.items[&id].slot_bytes);
                    self.in_flight.push((action, self.last[&id]));
                }
                Action::Write { id, .. } => {
                    assert!(!self.in_flight.iter().any(|(other, _)| *other == action), "{id} has one write at a time");
                    self.in_flight.push((action, self.memory[&id]));
                }
                Action::SlotReserved => {}
            }
            self.check();
        }
        panic!("the residency plans actions forever");
    }

    /// No two slots overlap, and no evicted item had unwritten bytes.
    fn check(&self) {
        let mut borrowed: Vec<(usize, usize, ItemId)> = Vec::new();
        for (id, item) in &self.residency.items {
            if let Some(slot) = item.state.slot() {
                borrowed.push((slot, slot + item.slot_bytes, *id));
            }
            if item.state == ItemState::Absent && item.on_disk {
                assert_eq!(self.disk.get(id), Some(&Some(self.last[id])), "{id} was evicted unwritten");
            }
            let reads_and_writes = self.in_flight.iter().filter(|(action, _)| id_of(*action) == *id).count();
            let is_busy = matches!(item.state, ItemState::Reading { .. } | ItemState::Writing { .. });
            assert_eq!(reads_and_writes, usize::from(is_busy));
        }
        borrowed.sort_unstable();
        assert!(borrowed.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{borrowed:?}");
        assert_eq!(borrowed.iter().map(|(from, to, _)| to - from).sum::<usize>(), self.residency.resident_bytes());
        assert_eq!(self.residency.in_flight(), self.in_flight.len());
    }

    /// A flush that is over has written its version, or a newer one.
    fn check_flushes(&mut self) {
        let (residency, disk) = (&self.residency, &self.disk);
        self.flushes.retain(|(flush, version)| {
            let is_over = residency.is_flush_over(*flush);
            let is_stored = residency.items.get(&flush.id).is_some_and(|item| !item.is_deleted && item.on_disk);
            if is_over && is_stored {
                assert!(disk[&flush.id] >= Some(*version), "the flush of {} ended too early", flush.id);
            }
            !is_over
        });
    }

    fn end(&mut self, which: usize, is_good: bool) {
        if self.in_flight.is_empty() {
            return;
        }
        let (action, version) = self.in_flight.swap_remove(which % self.in_flight.len());
        match action {
            Action::Read { id, .. } => {
                if is_good {
                    self.memory.insert(id, version);
                }
                self.residency.read_completed(id, is_good, true);
            }
            Action::Write { id, .. } => {
                let is_whole = is_good && self.memory.get(&id) == Some(&version);
                self.disk.insert(id, is_whole.then_some(version));
                self.residency.write_completed(id, is_good);
                if !is_good {
                    self.flushes.retain(|(flush, _)| flush.id != id);
                }
                self.check_flushes();
            }
            Action::SlotReserved => {}
        }
    }

    fn borrow(&mut self, id: ItemId, mode: BorrowMode) {
        let borrowed = self.residency.try_borrow(id, mode);
        let BorrowResult::Borrowed(slot) = borrowed else { return };
        let sole = |mode: BorrowMode| mode.is_exclusive();
        let others = self.held.iter().filter(|(other, _)| *other == id);
        assert!(
            others.clone().all(|(_, other)| !sole(*other)) && (!sole(mode) || others.count() == 0),
            "two exclusive borrows"
        );
        if mode.needs_memory() {
            assert!(slot.is_some());
        }
        match mode {
            BorrowMode::Shared | BorrowMode::Exclusive => {
                assert_eq!(self.memory[&id], self.last[&id], "memory has the latest bytes");
            }
            BorrowMode::Create | BorrowMode::DiskShared | BorrowMode::DiskExclusive => {}
        }
        if mode == BorrowMode::Create {
            self.change(id);
        }
        self.held.push((id, mode));
    }

    fn change(&mut self, id: ItemId) {
        self.versions += 1;
        self.last.insert(id, self.versions);
        self.memory.insert(id, self.versions);
    }

    fn release(&mut self, which: usize, is_dirty: bool) {
        if self.held.is_empty() {
            return;
        }
        let (id, mode) = self.held.swap_remove(which % self.held.len());
        let is_dirty = (is_dirty && mode == BorrowMode::Exclusive) || mode == BorrowMode::Create;
        if is_dirty && mode == BorrowMode::Exclusive {
            self.change(id);
        }
        if mode == BorrowMode::DiskExclusive && is_dirty {
            self.residency.disk_changed(id);
        }
        self.residency.release(id, mode, is_dirty);
    }

    fn cancel_waiter(&mut self, which: usize) {
        if !self.waiters.is_empty() {
            let (id, mode) = self.waiters.swap_remove(which % self.waiters.len());
            self.residency.cancel_waiter(id, mode);
        }
    }

    fn act(&mut self, step: Step) {
        const MODES: [BorrowMode; 5] = [
            BorrowMode::Shared,
            BorrowMode::Exclusive,
            BorrowMode::Create,
            BorrowMode::DiskShared,
            BorrowMode::DiskExclusive,
        ];
        match step {
            Step::Add { key, bytes } => {
                if self.id(key).is_none() {
                    let id = self.residency.add(&key.to_string().into(), bytes * SLOT_BYTES, false);
                    self.last.insert(id, 0);
                    self.residency.enqueue_waiter(id, BorrowMode::Create);
                    self.waiters.push((id, BorrowMode::Create));
                }
            }
            Step::Borrow { key, mode } => {
                if let Some(id) = self.id(key) {
                    self.borrow(id, MODES[mode]);
                }
            }
            Step::Release { which, is_dirty } => self.release(which, is_dirty),
            Step::Wait { key, is_create } => {
                if let Some(id) = self.id(key) {
                    let mode = if is_create { BorrowMode::Create } else { BorrowMode::Shared };
                    self.residency.enqueue_waiter(id, mode);
                    self.waiters.push((id, mode));
                }
            }
            Step::CancelWait { which } => self.cancel_waiter(which),
            Step::Delete { key } => {
                if let Some(id) = self.id(key) {
                    self.residency.delete(id);
                }
            }
            Step::Prefetch { key } => {
                if let Some(id) = self.id(key) {
                    self.residency.prefetch(id);
                }
            }
            Step::Flush { key } => {
                if let Some(id) = self.id(key) {
                    self.flushes.extend(self.residency.flush(id).map(|flush| (flush, self.last[&id])));
                }
            }
            Step::End { which, is_good } => self.end(which, is_good),
            Step::Schedule { keys, repeats } => {
                let keys = keys.into_iter().map(|key| key.to_string().into()).collect();
                self.residency.schedule(NextUseQueue::new(keys, repeats));
            }
        }
        self.pump();
        self.check_flushes();
    }

    fn complete_all(&mut self) {
        while !self.in_flight.is_empty() {
            self.end(0, true);
            self.pump();
        }
    }
}

fn id_of(action: Action) -> ItemId {
    match action {
        Action::Read { id, .. } | Action::Write { id, .. } => id,
        Action::SlotReserved => ItemId::MAX - 1,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn borrows_find_the_latest_bytes(
        steps in prop::collection::vec(step(), 1..120),
        slots in 4_usize..14,
        prefetch in 0_usize..10,
        headroom in 0_usize..10,
    ) {
        let mut world = World::new(slots, prefetch, headroom);
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
    let was_there = world.residency.residence(id) == Residence::Memory;
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
    let here = |id: usize| world.residency.residence(ids[id]) == Residence::Memory;
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
    let away = *ids.iter().find(|id| world.residency.residence(**id) == Residence::Disk).unwrap();
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
