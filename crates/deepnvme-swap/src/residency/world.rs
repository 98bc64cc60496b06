//! A simple model of items, memory and disk, which does what the residency plans and checks each step.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::item::ItemState;
use super::reference::{self, Expected};
use super::*;
use crate::next_use::NextUseQueue;
use crate::slot_allocator::ItemId;

pub(super) const SLOT_BYTES: usize = 4;

#[derive(Clone, Debug)]
pub(super) enum Step {
    Add {
        key: usize,
        bytes: usize,
    },
    Borrow {
        key: usize,
        mode: usize,
    },
    /// Waits for an item, borrows it and returns it.
    Use {
        key: usize,
        is_dirty: bool,
    },
    Release {
        which: usize,
        is_dirty: bool,
    },
    Wait {
        key: usize,
        is_create: bool,
    },
    CancelWait {
        which: usize,
    },
    Delete {
        key: usize,
    },
    Prefetch {
        key: usize,
    },
    Flush {
        key: usize,
    },
    End {
        which: usize,
        is_good: bool,
    },
    Schedule {
        keys: Vec<usize>,
        repeats: bool,
    },
}

pub(super) fn step() -> impl Strategy<Value = Step> {
    let key = 0_usize..7;
    prop_oneof![
        2 => (key.clone(), 1_usize..5).prop_map(|(key, bytes)| Step::Add { key, bytes }),
        16 => (key.clone(), any::<bool>()).prop_map(|(key, is_dirty)| Step::Use { key, is_dirty }),
        5 => (key.clone(), 0_usize..5).prop_map(|(key, mode)| Step::Borrow { key, mode }),
        5 => (any::<usize>(), any::<bool>()).prop_map(|(which, is_dirty)| Step::Release { which, is_dirty }),
        4 => (key.clone(), any::<bool>()).prop_map(|(key, is_create)| Step::Wait { key, is_create }),
        3 => any::<usize>().prop_map(|which| Step::CancelWait { which }),
        1 => key.clone().prop_map(|key| Step::Delete { key }),
        2 => key.clone().prop_map(|key| Step::Prefetch { key }),
        1 => key.clone().prop_map(|key| Step::Flush { key }),
        6 => (any::<usize>(), 0..10).prop_map(|(which, luck)| Step::End { which, is_good: luck > 1 }),
        3 => (prop::collection::vec(key, 0..16), any::<bool>()).prop_map(|(keys, repeats)| Step::Schedule { keys, repeats }),
    ]
}

/// A simple model: the latest version of each item, and the versions in memory and on disk.
pub(super) struct World {
    pub(super) residency: Residency,
    pub(super) last: BTreeMap<ItemId, u32>,
    pub(super) memory: BTreeMap<ItemId, u32>,
    /// `None` if a write failed half-way.
    pub(super) disk: BTreeMap<ItemId, Option<u32>>,
    pub(super) held: Vec<(ItemId, BorrowMode)>,
    pub(super) waiters: Vec<(ItemId, BorrowMode)>,
    pub(super) in_flight: Vec<(Action, u32)>,
    slots: BTreeMap<ItemId, std::ops::Range<usize>>,
    /// Flushes that are not over, with the version that each has to write.
    pub(super) flushes: Vec<(PendingFlush, u32)>,
    versions: u32,
    /// Items whose slot has no bytes yet.
    reserved: BTreeSet<ItemId>,
}

impl World {
    pub(super) fn new(slots: usize, prefetch: usize, headroom: usize) -> Self {
        let budgets = Budgets { prefetch_bytes: prefetch * SLOT_BYTES, headroom_bytes: headroom * SLOT_BYTES };
        let mut residency = Residency::new(slots * SLOT_BYTES, budgets);
        residency.search_steps_max = usize::MAX;
        Self {
            residency,
            last: BTreeMap::new(),
            memory: BTreeMap::new(),
            disk: BTreeMap::new(),
            held: Vec::new(),
            waiters: Vec::new(),
            in_flight: Vec::new(),
            slots: BTreeMap::new(),
            flushes: Vec::new(),
            versions: 0,
            reserved: BTreeSet::new(),
        }
    }

    pub(super) fn id(&self, key: usize) -> Option<ItemId> {
        self.residency.find(&key.to_string())
    }

    /// The next action, which has to be that of the reference.
    fn next(&mut self) -> Option<Action> {
        let expected = reference::next(&self.residency);
        let in_memory: Vec<ItemId> = self.resident().collect();
        let action = self.residency.next();
        let evicted = in_memory.into_iter().filter(|id| self.residency.items[id].state == ItemState::Absent).collect();
        let found = match action {
            None => Expected::Nothing,
            Some(Action::Write { id, .. }) => Expected::Write(id),
            Some(Action::Read { id, .. }) => Expected::Slot(id, true, evicted),
            Some(Action::SlotReserved) => {
                let is_new = |id: &ItemId| matches!(self.residency.items[id].state, ItemState::Reserved { .. });
                let new = self.resident().find(|id| is_new(id) && !self.reserved.contains(id));
                Expected::Slot(new.unwrap(), false, evicted)
            }
        };
        if self.residency.search_steps_max == usize::MAX {
            assert_eq!(found, expected);
        } else {
            // For a waiter, a search that is cut short finds a slot as well, perhaps a worse one. A prefetch may fail.
            let may_fail = self.residency.index.lacking.is_empty() || self.has_writes_in_flight();
            assert!(found != Expected::Nothing || expected == Expected::Nothing || may_fail, "{expected:?}");
        }
        let is_reserved = |item: &item::Item| matches!(item.state, ItemState::Reserved { .. });
        self.reserved = self.resident().filter(|id| is_reserved(&self.residency.items[id])).collect();
        if action.is_none() {
            reference::check_window(&self.residency);
        }
        action
    }

    fn has_writes_in_flight(&self) -> bool {
        self.in_flight.iter().any(|(action, _)| matches!(action, Action::Write { .. }))
    }

    fn resident(&self) -> impl Iterator<Item = ItemId> {
        self.residency.items.iter().filter(|(_, item)| item.state != ItemState::Absent).map(|(id, _)| *id)
    }

    /// Does all actions that the residency plans.
    pub(super) fn pump(&mut self) {
        for _ in 0..1000 {
            let Some(action) = self.next() else { return self.check() };
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
        reference::check_index(&self.residency);
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
    pub(super) fn check_flushes(&mut self) {
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

    pub(super) fn end(&mut self, which: usize, is_good: bool) {
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

    pub(super) fn borrow(&mut self, id: ItemId, mode: BorrowMode) {
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

    pub(super) fn release(&mut self, which: usize, is_dirty: bool) {
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

    pub(super) fn cancel_waiter(&mut self, which: usize) {
        if !self.waiters.is_empty() {
            let (id, mode) = self.waiters.swap_remove(which % self.waiters.len());
            self.residency.cancel_waiter(id, mode);
        }
    }

    pub(super) fn act(&mut self, step: Step) {
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
            Step::Use { key, is_dirty } => {
                if let Some(id) = self.id(key) {
                    self.use_one(id, is_dirty);
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

    /// Waits for an item while all I/O completes, borrows it and returns it. Creates it if nobody has.
    fn use_one(&mut self, id: ItemId, is_dirty: bool) {
        let is_new = self.residency.location(id) == ItemLocation::Neither;
        let mode = if is_new { BorrowMode::Create } else { BorrowMode::Exclusive };
        self.residency.enqueue_waiter(id, mode);
        self.pump();
        self.complete_all();
        let held = self.held.len();
        self.borrow(id, mode);
        self.residency.cancel_waiter(id, mode);
        self.pump();
        if self.held.len() > held {
            self.release(held, is_dirty);
        }
    }

    pub(super) fn complete_all(&mut self) {
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
