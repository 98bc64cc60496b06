//! What is where, who may have it, and what is read and written next: pure.
//!
//! ```text
//!            read              lend exclusive, put            write-back
//!  Absent ---------> Reading ---------> Clean <-----> Dirty ---------> Writing
//!    ^                  | failed          | evicted      ^  failed        |
//!    +------------------+-----------------+              +----------------+--> Clean, or Dirty where it changed meanwhile
//!    +--> Blank: a place for bytes that are about to be put, which nothing is read into
//! ```
//!
//! Beside that an item is held: by any number of those who read it, or by one who may change it. Whoever holds it keeps its
//! place. It may be written back meanwhile; what changed is written again.
//!
//! `next` says what to do, in this order: what a flush asks for, room for those who wait, what is due soon, and last the
//! write-back of what is due late, so that there is always room for the next reads.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use crate::next_use::Order;
use crate::slot_allocator::{Id, Places};

/// Items that are looked at ahead.
const AHEAD_ITEMS_MAX: usize = 256;
/// The owner of places whose memory was lost to an error of the engine.
const NOBODY: Id = Id::MAX;

/// What somebody wants of an item.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Mode {
    /// To read it in memory.
    Shared,
    /// To change it in memory.
    Exclusive,
    /// To put other bytes into its memory, whatever is there.
    Fill,
    /// To read it on disk: it does not change meanwhile.
    Pin,
    /// To change it on disk, or do away with it.
    Claim,
}

impl Mode {
    pub(crate) fn is_sole(self) -> bool {
        matches!(self, Self::Exclusive | Self::Fill | Self::Claim)
    }

    pub(crate) fn needs_memory(self) -> bool {
        matches!(self, Self::Shared | Self::Exclusive | Self::Fill)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Absent,
    Blank { at: usize },
    Reading { at: usize },
    Clean { at: usize },
    Dirty { at: usize },
    Writing { at: usize, changed: bool },
}

/// An item, as far as decisions need it.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    key: Arc<str>,
    place_bytes: usize,
    state: State,
    /// Whether the disk has its bytes, or had the last ones that are complete.
    on_disk: bool,
    shared: u32,
    is_sole: bool,
    /// Those who wait for its bytes, and those who wait for a place to put others.
    demands: u32,
    fills: u32,
    wanted: Option<u64>,
    used: u64,
    write_failed: bool,
    read_failed: bool,
    is_forgotten: bool,
}

/// What came of asking for an item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Take {
    /// It is the caller's until it is released; where in memory, if it is there.
    Held(Option<usize>),
    /// Others hold it.
    Others,
    /// It is on its way.
    Io,
    /// It has no place in memory.
    Memory,
    /// There is no such item any more.
    Gone,
}

/// What to do next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Action {
    /// Read an item into its place.
    Read { id: Id, at: usize },
    /// Write an item from its place.
    Write { id: Id, at: usize },
    /// Nothing: somebody who waits has got a place.
    Placed,
}

/// Where the bytes of an item are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Whereabouts {
    /// In memory, and perhaps on disk.
    Memory,
    /// On disk and not in memory.
    Disk,
    /// Between the two, or nowhere yet.
    Neither,
}

/// Bounds on what is done early.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Bounds {
    /// Bytes of what comes next in the order that may be in memory before it is used.
    pub(crate) ahead_bytes: usize,
    /// Bytes of memory that are kept free, or could be at once.
    pub(crate) reserve_bytes: usize,
}

/// The state of all items and of the arena.
#[derive(Debug)]
pub(crate) struct Residency {
    items: BTreeMap<Id, Item>,
    keys: HashMap<Arc<str>, Id>,
    places: Places,
    bounds: Bounds,
    order: Order,
    wanted: VecDeque<Id>,
    wanted_turn: u64,
    /// Those who wait for a place, in the order in which they came.
    queue: VecDeque<Id>,
    /// What a flush has asked for.
    flushing: BTreeSet<Id>,
    /// Items that are no more, whose place on disk is free.
    gone: Vec<Id>,
    next_id: Id,
    clock: u64,
    in_flight: usize,
    pub(crate) evictions: u64,
}

impl Residency {
    pub(crate) fn new(arena_bytes: usize, bounds: Bounds) -> Self {
        Self {
            items: BTreeMap::new(),
            keys: HashMap::new(),
            places: Places::new(arena_bytes),
            bounds,
            order: Order::default(),
            wanted: VecDeque::new(),
            wanted_turn: 0,
            queue: VecDeque::new(),
            flushing: BTreeSet::new(),
            gone: Vec::new(),
            next_id: 0,
            clock: 0,
            in_flight: 0,
            evictions: 0,
        }
    }

    /// A new item, which is on disk already or will be put into memory. The key is free.
    pub(crate) fn add(&mut self, key: &Arc<str>, place_bytes: usize, on_disk: bool) -> Id {
        let id = self.next_id;
        self.next_id += 1;
        let before = self.keys.insert(Arc::clone(key), id);
        debug_assert!(before.is_none(), "{key} is there already");
        let item = Item {
            key: Arc::clone(key),
            place_bytes,
            state: State::Absent,
            on_disk,
            shared: 0,
            is_sole: false,
            demands: 0,
            fills: 0,
            wanted: None,
            used: self.clock,
            write_failed: false,
            read_failed: false,
            is_forgotten: false,
        };
        self.items.insert(id, item);
        id
    }

    pub(crate) fn find(&self, key: &str) -> Option<Id> {
        self.keys.get(key).copied()
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = (&Arc<str>, Id)> {
        self.keys.iter().map(|(key, id)| (key, *id))
    }

    pub(crate) fn len(&self) -> usize {
        self.keys.len()
    }

    /// Bytes of memory in use.
    pub(crate) fn resident_bytes(&self) -> usize {
        self.places.len() - self.places.free()
    }

    /// Reads and writes on their way.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// The order in which items will be used from now on.
    pub(crate) fn schedule(&mut self, order: Order) {
        self.order = order;
    }

    /// Somebody will use the item soon.
    pub(crate) fn want(&mut self, id: Id) {
        let turn = self.wanted_turn;
        if let Some(item) = self.items.get_mut(&id).filter(|item| !item.is_forgotten) {
            item.read_failed = false;
            if item.wanted.is_none() {
                self.wanted_turn += 1;
                item.wanted = Some(turn);
                self.wanted.push_back(id);
            }
        }
    }

    /// Somebody asks for an item.
    pub(crate) fn take(&mut self, id: Id, mode: Mode) -> Take {
        let Some(item) = self.items.get_mut(&id).filter(|item| !item.is_forgotten) else { return Take::Gone };
        if item.is_sole || (mode.is_sole() && item.shared > 0) {
            return Take::Others;
        }
        let at = match (mode, item.state) {
            (Mode::Claim, State::Reading { .. } | State::Writing { .. }) => return Take::Io,
            // Its first bytes are being put.
            (Mode::Pin | Mode::Claim, State::Absent | State::Blank { .. }) if !item.on_disk => return Take::Io,
            (Mode::Pin | Mode::Claim, state) => state.at(),
            (Mode::Fill, State::Blank { at }) => Some(at),
            (_, State::Blank { .. } | State::Reading { .. }) => return Take::Io,
            (Mode::Shared | Mode::Exclusive, State::Absent) if !item.on_disk => return Take::Io,
            (_, State::Absent) => return Take::Memory,
            (_, State::Clean { at } | State::Dirty { at } | State::Writing { at, .. }) => Some(at),
        };
        if mode == Mode::Fill
            && let State::Blank { at } | State::Clean { at } = item.state
        {
            item.state = State::Dirty { at };
        }
        if mode.is_sole() {
            item.is_sole = true;
        } else {
            item.shared += 1;
        }
        if mode.needs_memory() {
            self.clock += 1;
            (item.used, item.wanted) = (self.clock, None);
            self.order.used(&item.key);
        }
        Take::Held(at)
    }

    /// Whoever held an item needs it no more, and has changed it if it is dirty.
    pub(crate) fn release(&mut self, id: Id, mode: Mode, is_dirty: bool) {
        let Some(item) = self.items.get_mut(&id) else { return };
        if mode.is_sole() {
            debug_assert!(item.is_sole, "{} was not held", item.key);
            item.is_sole = false;
        } else {
            debug_assert!(item.shared > 0, "{} was not held", item.key);
            item.shared -= 1;
        }
        if is_dirty {
            item.state = match item.state {
                State::Clean { at } => State::Dirty { at },
                State::Writing { at, .. } => State::Writing { at, changed: true },
                other => other,
            };
        }
        self.bury(id);
    }

    /// Whoever claimed an item has written it on disk: what is in memory is old.
    pub(crate) fn rewritten(&mut self, id: Id) {
        let Some(item) = self.items.get_mut(&id) else { return };
        item.on_disk = true;
        if let Some(at) = item.state.at() {
            item.state = State::Absent;
            self.places.leave(at);
        }
    }

    /// Somebody waits for a place: to read the item into, or to put other bytes into.
    pub(crate) fn demand(&mut self, id: Id, mode: Mode) {
        // Whoever waits has everything tried again once.
        self.items.values_mut().for_each(|item| item.write_failed = false);
        let Some(item) = self.items.get_mut(&id) else { return };
        item.read_failed = false;
        *(if mode == Mode::Fill { &mut item.fills } else { &mut item.demands }) += 1;
        self.queue.push_back(id);
    }

    /// They wait no more.
    pub(crate) fn undemand(&mut self, id: Id, mode: Mode) {
        let Some(item) = self.items.get_mut(&id) else { return };
        *(if mode == Mode::Fill { &mut item.fills } else { &mut item.demands }) -= 1;
        if let Some(place) = self.queue.iter().position(|other| *other == id) {
            self.queue.remove(place);
        }
        // A place that nobody puts anything into is nobody's.
        if let (State::Blank { at }, 0) = (item.state, item.fills) {
            item.state = State::Absent;
            self.places.leave(at);
        }
        self.bury(id);
    }

    /// The key is free from now on; the item goes when nobody holds it.
    pub(crate) fn forget(&mut self, id: Id) {
        let Some(item) = self.items.get_mut(&id).filter(|item| !item.is_forgotten) else { return };
        item.is_forgotten = true;
        self.keys.remove(&item.key);
        self.flushing.remove(&id);
        self.bury(id);
    }

    /// Whether some items are gone as soon as the disk has ended what it does for them.
    pub(crate) fn is_burying(&self) -> bool {
        let is_busy = |item: &Item| matches!(item.state, State::Reading { .. } | State::Writing { .. });
        self.items.values().any(|item| item.is_forgotten && item.is_idle() && is_busy(item))
    }

    /// Whether there are items that are no more since the last call of [`take_gone`](Self::take_gone).
    pub(crate) fn has_gone(&self) -> bool {
        !self.gone.is_empty()
    }

    /// Items that are no more since the last call.
    pub(crate) fn take_gone(&mut self) -> Vec<Id> {
        std::mem::take(&mut self.gone)
    }

    fn bury(&mut self, id: Id) {
        let Some(item) = self.items.get(&id) else { return };
        let is_busy = matches!(item.state, State::Reading { .. } | State::Writing { .. });
        if !item.is_forgotten || item.is_sole || item.shared > 0 || is_busy || item.demands + item.fills > 0 {
            return;
        }
        if let Some(at) = item.state.at() {
            self.places.leave(at);
        }
        self.items.remove(&id);
        self.wanted.retain(|other| *other != id);
        self.gone.push(id);
    }

    /// Has an item written back; whether there is anything to wait for.
    pub(crate) fn flush(&mut self, id: Id) -> bool {
        let Some(item) = self.items.get_mut(&id).filter(|item| !item.is_forgotten) else { return false };
        let is_behind = item.is_behind();
        if is_behind {
            item.write_failed = false;
            self.flushing.insert(id);
        }
        is_behind
    }

    /// Whether memory has bytes of an item that the disk has not.
    pub(crate) fn is_behind(&self, id: Id) -> bool {
        self.items.get(&id).is_some_and(|item| !item.is_forgotten && item.is_behind())
    }

    /// Whether whoever waits for a place for the item has one, or will be told why not.
    pub(crate) fn is_settled(&self, id: Id) -> bool {
        self.items.get(&id).is_none_or(|item| item.state != State::Absent || item.read_failed || item.is_forgotten)
    }

    /// Whether somebody holds an item who may change it.
    pub(crate) fn is_sole(&self, id: Id) -> bool {
        self.items.get(&id).is_some_and(|item| item.is_sole)
    }

    pub(crate) fn whereabouts(&self, id: Id) -> Whereabouts {
        match self.items.get(&id).map(|item| (item.state, item.on_disk)) {
            Some((State::Absent, true)) => Whereabouts::Disk,
            Some((State::Clean { .. } | State::Dirty { .. } | State::Writing { .. }, _)) => Whereabouts::Memory,
            _ => Whereabouts::Neither,
        }
    }

    /// A read has ended. Of a failed one, whether its memory came home.
    pub(crate) fn landed(&mut self, id: Id, is_good: bool, is_home: bool) {
        let Some(item) = self.items.get_mut(&id) else { return };
        let State::Reading { at } = item.state else { return };
        self.in_flight -= 1;
        if is_good {
            item.state = State::Clean { at };
        } else {
            (item.state, item.read_failed, item.wanted) = (State::Absent, true, None);
            self.places.leave(at);
            if !is_home {
                self.places.take(at, item.place_bytes, NOBODY);
            }
        }
        self.bury(id);
    }

    /// A write has ended.
    pub(crate) fn written(&mut self, id: Id, is_good: bool) {
        let Some(item) = self.items.get_mut(&id) else { return };
        let State::Writing { at, changed } = item.state else { return };
        self.in_flight -= 1;
        (item.state, item.write_failed) = match (is_good, changed) {
            (true, false) => (State::Clean { at }, false),
            (true, true) => (State::Dirty { at }, false),
            (false, _) => (State::Dirty { at }, true),
        };
        item.on_disk |= is_good;
        if !is_good || !changed {
            self.flushing.remove(&id);
        }
        self.bury(id);
    }

    /// What to do next; nothing until something changes.
    pub(crate) fn next(&mut self) -> Option<Action> {
        self.next_flush().or_else(|| self.next_demand()).or_else(|| self.next_early())
    }

    fn next_flush(&mut self) -> Option<Action> {
        let items = &self.items;
        self.flushing.retain(|id| items.get(id).is_some_and(Item::is_behind));
        let ready = |id: &Id| items.get(id).is_some_and(|item| item.is_writable() && !item.write_failed);
        let id = self.flushing.iter().copied().find(ready)?;
        self.write(id)
    }

    /// Room for those who wait.
    fn next_demand(&mut self) -> Option<Action> {
        for index in 0..self.queue.len() {
            let id = self.queue[index];
            let Some(item) = self.items.get(&id) else { continue };
            let is_read = item.on_disk && item.demands > 0;
            if item.state != State::Absent || item.is_sole || item.read_failed || !(is_read || item.fills > 0) {
                continue;
            }
            match self.room(id, None) {
                Room::At(at) => return Some(self.place(id, at, is_read)),
                Room::After(write) => return self.write(write),
                Room::Later | Room::Never => {}
            }
        }
        None
    }

    /// What is due soon is read, and what is due late is written.
    fn next_early(&mut self) -> Option<Action> {
        let is_short =
            |id: &Id| self.items.get(id).is_some_and(|item| item.state == State::Absent && !item.read_failed);
        if self.queue.iter().any(is_short) {
            return None;
        }
        let (near, missing) = self.ahead();
        if let Some(id) = missing {
            match self.room(id, Some(self.due(id))) {
                Room::At(at) => return Some(self.place(id, at, true)),
                Room::After(write) => return self.write(write),
                // What comes later is no more urgent.
                Room::Later | Room::Never => {}
            }
        }
        let late = self.late(&near)?;
        self.write(late)
    }

    /// What is due soon, and the first of it that is on disk only.
    fn ahead(&mut self) -> (BTreeSet<Id>, Option<Id>) {
        let items = &self.items;
        self.wanted.retain(|id| items.get(id).is_some_and(|item| item.wanted.is_some()));
        let (mut near, mut missing, mut bytes) = (BTreeSet::new(), None, 0);
        let wanted = self.wanted.iter().copied().map(|id| (id, false));
        let expected = self.order.upcoming().filter_map(|key| self.keys.get(key)).map(|id| (*id, true));
        for (id, is_counted) in wanted.chain(expected).take(AHEAD_ITEMS_MAX) {
            let Some(item) = self.items.get(&id) else { continue };
            if item.is_sole || item.shared > 0 || near.contains(&id) {
                continue;
            }
            if is_counted {
                bytes += item.place_bytes;
                if bytes > self.bounds.ahead_bytes && bytes > item.place_bytes {
                    break;
                }
            }
            near.insert(id);
            if missing.is_none() && item.state == State::Absent && item.on_disk && !item.read_failed {
                missing = Some(id);
            }
        }
        (near, missing)
    }

    /// What to write back so that there is room in time.
    fn late(&self, near: &BTreeSet<Id>) -> Option<Id> {
        let mut ready = self.places.free();
        let mut latest: Option<(u64, Id)> = None;
        for id in self.places.owners() {
            let Some(item) = self.items.get(&id) else { continue };
            match item.state {
                State::Writing { changed: false, .. } => ready += item.place_bytes,
                State::Clean { .. } if item.is_idle() && !near.contains(&id) => ready += item.place_bytes,
                State::Dirty { .. } if item.is_idle() && !item.write_failed && !near.contains(&id) => {
                    latest = latest.max(Some((self.due(id), id)));
                }
                _ => {}
            }
            if ready >= self.bounds.reserve_bytes {
                return None;
            }
        }
        latest.map(|(_, id)| id)
    }

    /// A place for an item: for one that somebody waits for, at the cost of anything idle; else of what is due later.
    fn room(&mut self, id: Id, due: Option<u64>) -> Room {
        let len = self.items[&id].place_bytes;
        if let Some(at) = self.places.gap(len) {
            return Room::At(at);
        }
        let spare = |other: Id, is_clean_only: bool| {
            let item = self.items.get(&other)?;
            let may_go = match item.state {
                State::Clean { .. } => true,
                State::Dirty { .. } => !is_clean_only && !item.write_failed,
                State::Writing { .. } => !is_clean_only,
                State::Absent | State::Blank { .. } | State::Reading { .. } => false,
            };
            let spared = self.due(other);
            (may_go && item.is_idle() && due.is_none_or(|due| spared > due)).then_some(spared)
        };
        // What can go at once is better than what is better to go.
        if let Some(window) = self.places.window(len, |other| spare(other, true)) {
            for occupant in window.occupants {
                self.evict(occupant);
            }
            return Room::At(window.start);
        }
        let Some(window) = self.places.window(len, |other| spare(other, false)) else { return Room::Never };
        let is_dirty = |other: &Id| matches!(self.items[other].state, State::Dirty { .. });
        window.occupants.iter().copied().find(is_dirty).map_or(Room::Later, Room::After)
    }

    fn evict(&mut self, id: Id) {
        let Some(item) = self.items.get_mut(&id) else { return };
        if let State::Clean { at } = item.state {
            item.state = State::Absent;
            // What was asked for ahead and has to go is read again when somebody asks for it.
            item.wanted = None;
            self.places.leave(at);
            self.evictions += 1;
        }
    }

    fn place(&mut self, id: Id, at: usize, is_read: bool) -> Action {
        let Some(item) = self.items.get_mut(&id) else { return Action::Placed };
        self.places.take(at, item.place_bytes, id);
        if !is_read {
            item.state = State::Blank { at };
            return Action::Placed;
        }
        self.in_flight += 1;
        item.state = State::Reading { at };
        Action::Read { id, at }
    }

    fn write(&mut self, id: Id) -> Option<Action> {
        let item = self.items.get_mut(&id)?;
        let State::Dirty { at } = item.state else { return None };
        self.in_flight += 1;
        item.state = State::Writing { at, changed: false };
        Some(Action::Write { id, at })
    }

    fn due(&self, id: Id) -> u64 {
        self.items.get(&id).map_or(0, |item| self.order.due(&item.key, item.wanted, self.clock - item.used))
    }
}

/// What was found when room was looked for.
enum Room {
    At(usize),
    /// Once this one is written.
    After(Id),
    /// When what is being written has been.
    Later,
    /// As long as nobody returns anything.
    Never,
}

impl State {
    fn at(self) -> Option<usize> {
        match self {
            Self::Absent => None,
            Self::Blank { at }
            | Self::Reading { at }
            | Self::Clean { at }
            | Self::Dirty { at }
            | Self::Writing { at, .. } => Some(at),
        }
    }
}

impl Item {
    fn is_idle(&self) -> bool {
        !self.is_sole && self.shared == 0 && self.demands == 0 && self.fills == 0
    }

    fn is_writable(&self) -> bool {
        matches!(self.state, State::Dirty { .. }) && !self.is_sole
    }

    /// Whether memory has, or may come to have, bytes that the disk has not.
    fn is_behind(&self) -> bool {
        self.is_sole || matches!(self.state, State::Dirty { .. } | State::Writing { .. } | State::Blank { .. })
    }
}

#[cfg(test)]
mod tests;
