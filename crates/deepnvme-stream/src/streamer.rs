//! Units come into slots before they are called for.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use deepnvme_io::mem::sync::ignore_poison;
use deepnvme_io::mem::{Device, RegionMut, StreamHandle};
use deepnvme_io::{Engine, ReadItem, Refused};

use crate::cells::{Cells, overlaps};
use crate::crew::{Crew, Job};
use crate::error::{Error, Result};
use crate::flight::{Arrived, Flight, Waiting, whole};
use crate::residency::{Call, Residency};
use crate::source::Source;
use crate::stash::{Berths, Stash};
use crate::stats::{Busy, StreamStats};
use crate::sync::{Instant, Mutex, MutexGuard};
use crate::unit::{self, SlotClass, Unit};

/// Who waits without a limit looks again after this.
const LOOK_AGAIN: Duration = Duration::from_secs(3600);

/// Passes units through the slots of an arena. Shared freely between threads.
///
/// The memory of a unit is the caller's from `acquire` to `release`, to read; nothing is read into it meanwhile.
#[derive(Debug)]
pub struct Streamer {
    engine: Arc<Engine>,
    sources: Vec<Source>,
    units: Vec<Unit>,
    /// Where each slot begins.
    places: Vec<(usize, usize)>,
    classes: Vec<SlotClass>,
    berths: Berths,
    /// Where anything is converted on arrival.
    crew: Option<Crew>,
    state: Mutex<State>,
    creator: deepnvme_io::mem::CreatorProcess,
}

#[derive(Debug)]
struct State {
    residency: Residency,
    memory: Cells,
    flights: BTreeMap<usize, Flight>,
    /// When the fetch began that has failed, and why.
    failures: BTreeMap<usize, (Instant, Error)>,
    stats: StreamStats,
    busy: Busy,
    is_closed: bool,
}

impl Streamer {
    /// Units in the order in which they are expected to be called for at first. `arena` is cut into the slots of the first
    /// class, then those of the second, and so on, but for those that share the memory of the class before. As much of what becomes more bytes when it arrives as `stash_bytes_max`
    /// is enough for stays in memory as it is on disk, after it was read once.
    ///
    /// # Errors
    /// `Plan` where the units do not fit the slots, or the slots the arena; `Io` without memory for the stash.
    pub fn new(
        engine: Arc<Engine>,
        sources: Vec<Source>,
        units: Vec<Unit>,
        classes: &[SlotClass],
        arena: RegionMut,
        stash_bytes_max: u64,
    ) -> Result<Self> {
        if !arena.is_contiguous() {
            return Err(Error::Plan("the memory for slots is not contiguous".into()));
        }
        unit::check(&units, classes, sources.len(), arena.len())?;
        if arena.device() != Device::Host && classes.iter().any(|class| class.shares) {
            // A slot made of others would have to wait for several streams.
            return Err(Error::Plan("slots share memory on the host only".into()));
        }
        let places = unit::layout(classes);
        let memory = Cells::new(arena, &places);
        let class_of = units.iter().map(|unit| unit.class).collect();
        let residency = Residency::new(class_of, classes.iter().map(Into::into).collect(), overlaps(&places));
        let berths = Berths::choose(&units, residency.stays(), stash_bytes_max);
        let state = State {
            residency,
            memory,
            flights: BTreeMap::new(),
            failures: BTreeMap::new(),
            stats: StreamStats::default(),
            busy: Busy::default(),
            is_closed: false,
        };
        let largest = units.iter().flat_map(|unit| &unit.conversions).map(|conversion| conversion.bytes).max();
        let stash = Stash::new(&berths.bytes)?;
        let crew = largest.map(|bytes| Crew::start(&engine, bytes, stash)).transpose()?;
        let (classes, state) = (classes.to_vec(), Mutex::new(state));
        Ok(Self {
            engine,
            sources,
            units,
            places,
            classes,
            berths,
            crew,
            state,
            creator: deepnvme_io::mem::CreatorProcess::current(),
        })
    }

    /// Starts to fetch the first units, so that they come while the caller prepares.
    pub fn warm_up(&self) {
        let mut state = self.lock();
        if !state.is_closed {
            self.fetch_ahead(&mut state);
        }
    }

    /// Waits until a unit is in memory, and returns where in the arena its slot begins. It stays there until it is released,
    /// as often as it was acquired. `None` when it has not come in that time.
    ///
    /// # Errors
    /// `Io` and `Changed` where it cannot be fetched now, also after a fetch ahead has failed; the next call tries again.
    /// `Busy` where all slots are in use; `Closed`.
    ///
    /// # Panics
    /// When there is no such unit.
    pub fn acquire(&self, unit: usize, timeout: Option<Duration>) -> Result<Option<usize>> {
        let called = Instant::now();
        let deadline = timeout.and_then(|timeout| called.checked_add(timeout));
        let mut has_waited = false;
        loop {
            let waiting = {
                let mut state = self.lock();
                if state.is_closed {
                    return Err(Error::Closed);
                }
                self.harvest(&mut state);
                // What failed before anybody called for the unit is tried again.
                if let Some((_, error)) = state.failures.remove(&unit).filter(|(began, _)| *began >= called) {
                    return Err(error);
                }
                let call = state.residency.call(unit);
                let on_its_way = match call {
                    Call::Held(slot) => {
                        if has_waited {
                            state.stats.waits += 1;
                            state.stats.stalled += called.elapsed();
                        } else {
                            state.stats.hits += 1;
                        }
                        self.fetch_ahead(&mut state);
                        return Ok(Some(self.places[slot].0));
                    }
                    Call::Fetch(slot) => {
                        self.fetch(&mut state, unit, slot, true)?;
                        unit
                    }
                    Call::Wait => unit,
                    Call::Full => state.residency.loading_beside(unit).next().unwrap_or(unit),
                    Call::Stuck => {
                        return Err(Error::Busy { unit, slots: self.classes[self.units[unit].class].slots });
                    }
                };
                match state.flights.get(&on_its_way) {
                    Some(flight) => flight.waiting.clone(),
                    None => continue,
                }
            };
            has_waited = true;
            waiting.hurry(self.crew.as_ref());
            let until = deadline.unwrap_or_else(|| Instant::now() + LOOK_AGAIN);
            if !waiting.wait_until(until, self.crew.as_ref()) && deadline.is_some() {
                self.lock().stats.stalled += called.elapsed();
                return Ok(None);
            }
        }
    }

    /// The caller has done with a unit; on a GPU, when `stream` has come so far. False where it was not held.
    pub fn release(&self, unit: usize, stream: StreamHandle) -> bool {
        let mut state = self.lock();
        let Some(slot) = state.residency.held_in(unit) else {
            return false;
        };
        state.memory.used(slot, stream);
        state.residency.release(unit);
        if !state.is_closed {
            self.harvest(&mut state);
            self.fetch_ahead(&mut state);
        }
        true
    }

    /// What it has cost so far.
    #[must_use]
    pub fn stats(&self) -> StreamStats {
        let mut state = self.lock();
        self.harvest(&mut state);
        state.stats
    }

    /// Where the slots begin, and their bytes.
    #[must_use]
    pub fn slots(&self) -> &[(usize, usize)] {
        &self.places
    }

    /// The units.
    #[must_use]
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// Fetches nothing more, and waits for what is on its way. Memory that is held may be used still.
    pub fn close(&self) {
        let flights = {
            let mut state = self.lock();
            state.is_closed = true;
            std::mem::take(&mut state.flights)
        };
        for flight in flights.into_values() {
            if let Some(pending) = &flight.waiting.direct {
                pending.cancel();
            }
            // After a fork, what is on its way is the parent's.
            flight.waiting.wait_until(Instant::now() + LOOK_AGAIN, None);
        }
    }

    /// Bytes of memory beside the arena that conversions may take.
    #[must_use]
    pub fn conversion_bytes_max(&self) -> u64 {
        self.crew.as_ref().map_or(0, Crew::bound_bytes)
    }

    /// Bytes of memory that have, or will have, what is on disk.
    #[must_use]
    pub fn stash_bytes(&self) -> u64 {
        self.berths.total()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every critical section leaves the state whole.
        ignore_poison(self.state.lock())
    }

    fn fetch_ahead(&self, state: &mut State) {
        while let Some((unit, slot)) = state.residency.next_ahead() {
            if let Err(error) = self.fetch(state, unit, slot, false) {
                tracing::debug!(unit, %error, "a unit was not fetched ahead");
            }
        }
    }

    /// Starts to read a unit into a slot that is its own by now.
    fn fetch(&self, state: &mut State, unit: usize, slot: usize, is_urgent: bool) -> Result<()> {
        let refused = |state: &mut State, error| {
            state.residency.failed(unit);
            Err(error)
        };
        if let Err(error) = self.check_sources(unit) {
            return refused(state, error);
        }
        let Some(memory) = state.memory.take(slot) else {
            let lost = "the memory of a slot did not come home after an error; open the model again";
            return refused(state, Error::Plan(lost.into()));
        };
        let Cut { items, jobs, mut gaps } = self.cut(unit, memory);
        let started = Instant::now();
        // Also of a unit without bytes: it has to end.
        let is_direct = !items.is_empty() || jobs.is_empty();
        let direct = match is_direct.then(|| self.engine.offer_read_batch(items, is_urgent)).transpose() {
            Ok(direct) => direct.map(Arc::new),
            Err(Refused { error, memory }) => {
                gaps.extend(memory.into_iter().flatten());
                gaps.extend(jobs.into_iter().map(|job| job.target));
                state.memory.put(slot, whole(gaps));
                return refused(state, error.into());
            }
        };
        let task = self.crew.as_ref().filter(|_| !jobs.is_empty()).map(|crew| crew.begin(jobs, is_urgent));
        let waiting = Waiting { direct, task };
        state.flights.insert(unit, Flight { waiting, slot, gaps, started });
        state.stats.fetches += 1;
        state.stats.fetches_ahead += u64::from(!is_urgent);
        Ok(())
    }

    fn check_sources(&self, unit: usize) -> Result<()> {
        let mut checked = usize::MAX;
        for (_, source, _, _) in self.units[unit].parts() {
            if std::mem::replace(&mut checked, source) != source {
                self.sources[source].check()?;
            }
        }
        Ok(())
    }

    /// The reads of a unit, and the parts of the slot between them.
    fn cut(&self, unit: usize, memory: RegionMut) -> Cut {
        let Unit { pieces, conversions, .. } = &self.units[unit];
        let mut cut = Cut::default();
        let (mut rest, mut at) = (memory, 0);
        for (part, source, from, to) in self.units[unit].parts() {
            if from > at {
                let (gap, behind) = rest.split_at(from - at);
                cut.gaps.push(gap);
                rest = behind;
            }
            let (target, behind) = rest.split_at(to - from);
            let file = Arc::clone(self.sources[source].file());
            match part.checked_sub(pieces.len()) {
                None => cut.items.push(ReadItem { file, offset: pieces[part].offset, target }),
                Some(index) => {
                    let berth = self.berths.of(unit, index);
                    cut.jobs.push(Job { file, conversion: conversions[index], target, berth });
                }
            }
            (rest, at) = (behind, to);
        }
        cut.gaps.push(rest);
        cut
    }

    /// Takes note of all fetches that have ended.
    fn harvest(&self, state: &mut State) {
        let is_done = |flight: &Flight| flight.waiting.is_done();
        let ended: Vec<usize> = state.flights.iter().filter(|(_, it)| is_done(it)).map(|(unit, _)| *unit).collect();
        for unit in ended {
            let Some(flight) = state.flights.remove(&unit) else { continue };
            let (slot, started) = (flight.slot, flight.started);
            let Some(landed) = flight.land() else { continue };
            state.memory.put(slot, landed.memory);
            match landed.result {
                Ok(Arrived { bytes, finished, converting }) => {
                    state.stats.bytes_read += bytes;
                    state.stats.converting += converting;
                    state.stats.disk_busy += state.busy.add(started, finished);
                    state.residency.landed(unit);
                }
                Err(error) => {
                    state.residency.failed(unit);
                    state.failures.insert(unit, (started, self.explained(unit, error)));
                }
            }
        }
    }

    /// A read that failed because its file is another one by now says so.
    fn explained(&self, unit: usize, error: Error) -> Error {
        match self.check_sources(unit) {
            Err(changed @ Error::Changed { .. }) => changed,
            _ => error,
        }
    }
}

impl Drop for Streamer {
    fn drop(&mut self) {
        if !self.creator.is_current() {
            return; // what is on its way is the parent's
        }
        let state = ignore_poison(self.state.get_mut());
        // The engine keeps the memory until what it has begun is done.
        for flight in state.flights.values() {
            if let Some(pending) = &flight.waiting.direct {
                pending.cancel();
            }
        }
    }
}

/// What is done with the parts of a slot.
#[derive(Default)]
struct Cut {
    items: Vec<ReadItem>,
    jobs: Vec<Job>,
    gaps: Vec<RegionMut>,
}
