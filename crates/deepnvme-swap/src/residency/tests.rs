//! Every holder finds the last bytes, whatever the order in which reads and writes end, and fail.

use proptest::prelude::*;

use super::*;

const GRAIN: usize = 4;

#[derive(Clone, Debug)]
enum Step {
    Add { key: usize, bytes: usize },
    Take { key: usize, mode: usize },
    Release { which: usize, is_dirty: bool },
    Demand { key: usize, is_fill: bool },
    Undemand { which: usize },
    Forget { key: usize },
    Want { key: usize },
    Flush { key: usize },
    End { which: usize, is_good: bool },
    Schedule { keys: Vec<usize>, repeats: bool },
}

fn step() -> impl Strategy<Value = Step> {
    let key = 0_usize..7;
    prop_oneof![
        2 => (key.clone(), 1_usize..5).prop_map(|(key, bytes)| Step::Add { key, bytes }),
        5 => (key.clone(), 0_usize..5).prop_map(|(key, mode)| Step::Take { key, mode }),
        5 => (any::<usize>(), any::<bool>()).prop_map(|(which, is_dirty)| Step::Release { which, is_dirty }),
        4 => (key.clone(), any::<bool>()).prop_map(|(key, is_fill)| Step::Demand { key, is_fill }),
        3 => any::<usize>().prop_map(|which| Step::Undemand { which }),
        1 => key.clone().prop_map(|key| Step::Forget { key }),
        1 => key.clone().prop_map(|key| Step::Want { key }),
        1 => key.clone().prop_map(|key| Step::Flush { key }),
        6 => (any::<usize>(), 0..10).prop_map(|(which, luck)| Step::End { which, is_good: luck > 1 }),
        1 => (prop::collection::vec(key, 0..9), any::<bool>()).prop_map(|(keys, repeats)| Step::Schedule { keys, repeats }),
    ]
}

/// What a plain program would know: the last version of each item, and which one memory and disk have.
struct World {
    residency: Residency,
    last: BTreeMap<Id, u32>,
    memory: BTreeMap<Id, u32>,
    /// `None`: half of one version and half of another.
    disk: BTreeMap<Id, Option<u32>>,
    held: Vec<(Id, Mode)>,
    demands: Vec<(Id, Mode)>,
    flights: Vec<(Action, u32)>,
    places: BTreeMap<Id, std::ops::Range<usize>>,
    versions: u32,
}

impl World {
    fn new(places: usize, ahead: usize, reserve: usize) -> Self {
        let bounds = Bounds { ahead_bytes: ahead * GRAIN, reserve_bytes: reserve * GRAIN };
        Self {
            residency: Residency::new(places * GRAIN, bounds),
            last: BTreeMap::new(),
            memory: BTreeMap::new(),
            disk: BTreeMap::new(),
            held: Vec::new(),
            demands: Vec::new(),
            flights: Vec::new(),
            places: BTreeMap::new(),
            versions: 0,
        }
    }

    fn id(&self, key: usize) -> Option<Id> {
        self.residency.find(&key.to_string())
    }

    /// Does what the residency says, until it says no more.
    fn advance(&mut self) {
        for _ in 0..1000 {
            let Some(action) = self.residency.next() else { return self.check() };
            match action {
                Action::Read { id, at } => {
                    assert_eq!(self.disk[&id], Some(self.last[&id]), "what is read is what was written last");
                    self.places.insert(id, at..at + self.residency.items[&id].place_bytes);
                    self.flights.push((action, self.last[&id]));
                }
                Action::Write { id, .. } => {
                    assert!(!self.flights.iter().any(|(other, _)| *other == action), "{id} is written once at a time");
                    self.flights.push((action, self.memory[&id]));
                }
                Action::Placed => {}
            }
            self.check();
        }
        panic!("it never stops finding something to do");
    }

    /// Nobody is in somebody else's place, and nobody has left one with bytes that the disk has not.
    fn check(&self) {
        let mut taken: Vec<(usize, usize, Id)> = Vec::new();
        for (id, item) in &self.residency.items {
            if let Some(at) = item.state.at() {
                taken.push((at, at + item.place_bytes, *id));
            }
            if item.state == State::Absent && item.on_disk {
                assert_eq!(self.disk.get(id), Some(&Some(self.last[id])), "{id} left memory unwritten");
            }
            let reads_and_writes = self.flights.iter().filter(|(action, _)| id_of(*action) == *id).count();
            let is_busy = matches!(item.state, State::Reading { .. } | State::Writing { .. });
            assert_eq!(reads_and_writes, usize::from(is_busy));
        }
        taken.sort_unstable();
        assert!(taken.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{taken:?}");
        assert_eq!(taken.iter().map(|(from, to, _)| to - from).sum::<usize>(), self.residency.resident_bytes());
        assert_eq!(self.residency.in_flight(), self.flights.len());
    }

    fn end(&mut self, which: usize, is_good: bool) {
        if self.flights.is_empty() {
            return;
        }
        let (action, version) = self.flights.swap_remove(which % self.flights.len());
        match action {
            Action::Read { id, .. } => {
                if is_good {
                    self.memory.insert(id, version);
                }
                self.residency.landed(id, is_good, true);
            }
            Action::Write { id, .. } => {
                let is_whole = is_good && self.memory.get(&id) == Some(&version);
                self.disk.insert(id, is_whole.then_some(version));
                self.residency.written(id, is_good);
            }
            Action::Placed => {}
        }
    }

    fn take(&mut self, id: Id, mode: Mode) {
        let taken = self.residency.take(id, mode);
        let Take::Held(at) = taken else { return };
        let sole = |mode: Mode| mode.is_sole();
        let others = self.held.iter().filter(|(other, _)| *other == id);
        assert!(others.clone().all(|(_, other)| !sole(*other)) && (!sole(mode) || others.count() == 0), "held by two");
        if mode.needs_memory() {
            assert!(at.is_some());
        }
        match mode {
            Mode::Shared | Mode::Exclusive => assert_eq!(self.memory[&id], self.last[&id], "the last bytes are there"),
            Mode::Fill | Mode::Pin | Mode::Claim => {}
        }
        if mode == Mode::Fill {
            self.change(id);
        }
        self.held.push((id, mode));
    }

    fn change(&mut self, id: Id) {
        self.versions += 1;
        self.last.insert(id, self.versions);
        self.memory.insert(id, self.versions);
    }

    fn release(&mut self, which: usize, is_dirty: bool) {
        if self.held.is_empty() {
            return;
        }
        let (id, mode) = self.held.swap_remove(which % self.held.len());
        let is_dirty = (is_dirty && mode == Mode::Exclusive) || mode == Mode::Fill;
        if is_dirty && mode == Mode::Exclusive {
            self.change(id);
        }
        if mode == Mode::Claim && is_dirty {
            self.residency.rewritten(id);
        }
        self.residency.release(id, mode, is_dirty);
    }

    fn undemand(&mut self, which: usize) {
        if !self.demands.is_empty() {
            let (id, mode) = self.demands.swap_remove(which % self.demands.len());
            self.residency.undemand(id, mode);
        }
    }

    fn act(&mut self, step: Step) {
        const MODES: [Mode; 5] = [Mode::Shared, Mode::Exclusive, Mode::Fill, Mode::Pin, Mode::Claim];
        match step {
            Step::Add { key, bytes } => {
                if self.id(key).is_none() {
                    let id = self.residency.add(&key.to_string().into(), bytes * GRAIN, false);
                    self.last.insert(id, 0);
                    self.residency.demand(id, Mode::Fill);
                    self.demands.push((id, Mode::Fill));
                }
            }
            Step::Take { key, mode } => {
                if let Some(id) = self.id(key) {
                    self.take(id, MODES[mode]);
                }
            }
            Step::Release { which, is_dirty } => self.release(which, is_dirty),
            Step::Demand { key, is_fill } => {
                if let Some(id) = self.id(key) {
                    let mode = if is_fill { Mode::Fill } else { Mode::Shared };
                    self.residency.demand(id, mode);
                    self.demands.push((id, mode));
                }
            }
            Step::Undemand { which } => self.undemand(which),
            Step::Forget { key } => {
                if let Some(id) = self.id(key) {
                    self.residency.forget(id);
                }
            }
            Step::Want { key } => {
                if let Some(id) = self.id(key) {
                    self.residency.want(id);
                }
            }
            Step::Flush { key } => {
                if let Some(id) = self.id(key) {
                    self.residency.flush(id);
                }
            }
            Step::End { which, is_good } => self.end(which, is_good),
            Step::Schedule { keys, repeats } => {
                let keys = keys.into_iter().map(|key| key.to_string().into()).collect();
                self.residency.schedule(Order::new(keys, repeats));
            }
        }
        self.advance();
    }

    fn settle(&mut self) {
        while !self.flights.is_empty() {
            self.end(0, true);
            self.advance();
        }
    }
}

fn id_of(action: Action) -> Id {
    match action {
        Action::Read { id, .. } | Action::Write { id, .. } => id,
        Action::Placed => Id::MAX - 1,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn holders_find_the_last_bytes(
        steps in prop::collection::vec(step(), 1..120),
        places in 4_usize..14,
        ahead in 0_usize..10,
        reserve in 0_usize..10,
    ) {
        let mut world = World::new(places, ahead, reserve);
        steps.into_iter().for_each(|step| world.act(step));
        // Nobody wants anything any more: everything can be written, and had again.
        while !world.held.is_empty() {
            world.release(0, true);
        }
        while !world.demands.is_empty() {
            world.undemand(0);
        }
        world.advance();
        world.settle();
        let items: Vec<(Id, bool)> = world.residency.items.iter().map(|(id, item)| (*id, item.is_forgotten)).collect();
        for (id, is_forgotten) in items {
            prop_assert!(!is_forgotten, "nobody keeps {}", id);
            if world.residency.flush(id) {
                world.advance();
                world.settle();
                prop_assert!(!world.residency.is_behind(id));
                prop_assert_eq!(world.disk[&id], Some(world.last[&id]));
            }
            if !world.residency.items[&id].on_disk {
                continue;
            }
            world.residency.demand(id, Mode::Shared);
            world.advance();
            world.settle();
            let taken = world.residency.take(id, Mode::Shared);
            prop_assert!(matches!(taken, Take::Held(Some(_))), "{:?} of {}", taken, id);
            prop_assert_eq!(world.memory[&id], world.last[&id]);
            world.residency.release(id, Mode::Shared, false);
            world.residency.undemand(id, Mode::Shared);
        }
    }
}

/// Items of equal size that were put and written, in an arena of so many.
fn filled(items: usize, places: usize, ahead: usize, reserve: usize) -> (World, Vec<Id>) {
    let mut world = World::new(places, ahead, reserve);
    let ids = (0..items)
        .map(|key| {
            world.act(Step::Add { key, bytes: 1 });
            world.settle();
            let id = world.id(key).unwrap();
            world.take(id, Mode::Fill);
            world.undemand(0);
            world.release(0, true);
            world.advance();
            id
        })
        .collect();
    world.settle();
    (world, ids)
}

fn use_one(world: &mut World, id: Id, is_dirty: bool) -> bool {
    let was_there = world.residency.whereabouts(id) == Whereabouts::Memory;
    if !was_there {
        world.residency.demand(id, Mode::Exclusive);
        world.advance();
        world.settle();
        world.residency.undemand(id, Mode::Exclusive);
    }
    world.take(id, Mode::Exclusive);
    world.advance();
    let held = world.held.len() - 1;
    world.release(held, is_dirty);
    world.advance();
    world.settle();
    was_there
}

#[test]
fn an_order_that_repeats_is_read_ahead_and_some_of_it_stays() {
    let (mut world, ids) = filled(16, 8, 2, 2);
    let keys: Vec<Arc<str>> = (0..16).map(|key| key.to_string().into()).collect();
    world.residency.schedule(Order::new(keys, true));
    world.advance();
    world.settle();
    for round in 0..4 {
        let evictions = world.residency.evictions;
        for id in &ids {
            let was_there = use_one(&mut world, *id, true);
            assert!(was_there || round == 0, "item {id} was not there in round {round}");
        }
        let moved = world.residency.evictions - evictions;
        assert!(round < 2 || moved <= 13, "{moved} of 16 came anew; some stay");
    }
}

#[test]
fn without_an_order_who_was_used_longest_ago_goes() {
    let (mut world, ids) = filled(4, 3, 0, 0);
    for id in [0, 1, 2, 0, 1] {
        use_one(&mut world, ids[id], false);
        world.residency.flush(ids[id]);
        world.advance();
        world.settle();
    }
    use_one(&mut world, ids[3], false);
    let here = |id: usize| world.residency.whereabouts(ids[id]) == Whereabouts::Memory;
    assert_eq!([0, 1, 2, 3].map(here), [true, true, false, true]);
}

#[test]
fn what_fits_is_never_written() {
    let (mut world, ids) = filled(4, 8, 2, 2);
    for _ in 0..3 {
        for id in &ids {
            assert!(use_one(&mut world, *id, true));
        }
    }
    assert!(world.disk.is_empty());
}

#[test]
fn a_failed_write_is_tried_again_when_somebody_waits() {
    let (mut world, ids) = filled(3, 2, 0, 0);
    use_one(&mut world, ids[0], true);
    use_one(&mut world, ids[1], true);
    for _ in 0..2 {
        world.residency.demand(ids[2], Mode::Shared);
        world.advance();
        while !world.flights.is_empty() {
            world.end(0, false);
            world.advance();
        }
        world.residency.undemand(ids[2], Mode::Shared);
        assert_eq!(world.residency.take(ids[2], Mode::Shared), Take::Memory);
    }
    assert!(world.residency.next().is_none(), "nobody waits, and nothing is tried");
    world.residency.demand(ids[2], Mode::Shared);
    world.advance();
    world.settle();
    assert!(matches!(world.residency.take(ids[2], Mode::Shared), Take::Held(Some(_))));
}

#[test]
fn a_place_whose_memory_is_lost_is_used_no_more() {
    let (mut world, ids) = filled(3, 2, 0, 0);
    let away = *ids.iter().find(|id| world.residency.whereabouts(**id) == Whereabouts::Disk).unwrap();
    world.residency.demand(away, Mode::Shared);
    world.advance();
    world.flights.clear();
    world.residency.landed(away, false, false);
    assert_eq!(world.residency.take(away, Mode::Shared), Take::Memory);
    assert_eq!(world.residency.resident_bytes(), 2 * GRAIN, "one place is nobody's");
}
