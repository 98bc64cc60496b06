//! Streams layer groups through bounded memory, ahead of their use.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use deepnvme_file::VersionedFile;
use deepnvme_io::mem::sync::ignore_poison;
use deepnvme_io::mem::{Device, RegionMut, StreamHandle};
use deepnvme_io::{Engine, ReadItem, Refused};

use crate::compressed_cache::{CachePlan, CompressedCache};
use crate::decode_pool::{DecodeJob, DecodePool};
use crate::decode_task::FetchCost;
use crate::error::{Error, Result, check_unchanged};
use crate::fetch::{Fetch, FetchHandle, join_parts};
use crate::layer_group::{self, LayerGroup, SlotClass};
use crate::residency::{AcquireResult, Residency};
use crate::slot_memory::{SlotMemory, overlaps};
use crate::stats::{Busy, StreamStats};
use crate::sync::{Instant, Mutex, MutexGuard};

/// How often a wait without a time limit wakes up.
const POLL_INTERVAL: Duration = Duration::from_secs(3600);

/// The weights that a [`Streamer`] streams, and the memory for them.
#[derive(Debug, Default)]
pub struct StreamPlan {
    /// The files of the model.
    pub files: Vec<VersionedFile>,
    /// The layer groups, in the order that is expected at first.
    pub groups: Vec<LayerGroup>,
    /// The slots of the arena.
    pub classes: Vec<SlotClass>,
    /// Bytes of encoded weights that may be cached in memory after their first read.
    pub cache_bytes_max: u64,
}

/// Streams layer groups through the slots of an arena. Can be shared between threads.
///
/// The memory of a group may be read between `acquire` and `release`; nothing is written into it meanwhile.
#[derive(Debug)]
pub struct Streamer {
    engine: Arc<Engine>,
    files: Vec<VersionedFile>,
    groups: Vec<LayerGroup>,
    /// The offset and the length of each slot.
    slots: Vec<(usize, usize)>,
    classes: Vec<SlotClass>,
    cache_plan: CachePlan,
    /// The decoders, if any group has conversions.
    pool: Option<DecodePool>,
    state: Mutex<State>,
    creator: deepnvme_io::mem::CreatorProcess,
}

#[derive(Debug)]
struct State {
    residency: Residency,
    memory: SlotMemory,
    in_flight: BTreeMap<usize, Fetch>,
    /// For failed fetches, when they began and why they failed.
    failures: BTreeMap<usize, (Instant, Error)>,
    stats: StreamStats,
    busy: Busy,
    is_closed: bool,
}

impl Streamer {
    /// The arena contains the slots of the first class, then those of the second, and so on; classes that share memory
    /// begin where the previous one does.
    ///
    /// # Errors
    /// `Plan` if the groups do not fit the slots, or the slots the arena; `Io` without memory for the cache.
    pub fn new(engine: Arc<Engine>, plan: StreamPlan, arena: RegionMut) -> Result<Self> {
        let StreamPlan { files, groups, classes, cache_bytes_max } = plan;
        if !arena.is_contiguous() {
            return Err(Error::Plan("the memory for slots is not contiguous".into()));
        }
        layer_group::check(&groups, &classes, files.len(), arena.len())?;
        if arena.device() != Device::Host && classes.iter().any(|class| class.shares_memory) {
            // A slot that consists of others would have to wait for several streams.
            return Err(Error::Plan("slots share memory on the host only".into()));
        }
        let slots = layer_group::layout(&classes);
        let memory = SlotMemory::new(arena, &slots);
        let class_of = groups.iter().map(|group| group.class).collect();
        let residency = Residency::new(class_of, classes.iter().map(Into::into).collect(), overlaps(&slots));
        let cache_plan = CachePlan::choose(&groups, residency.pinned(), cache_bytes_max);
        let state = State {
            residency,
            memory,
            in_flight: BTreeMap::new(),
            failures: BTreeMap::new(),
            stats: StreamStats::default(),
            busy: Busy::default(),
            is_closed: false,
        };
        let largest = groups.iter().flat_map(|group| &group.conversions).map(|conversion| conversion.bytes).max();
        let cache = CompressedCache::new(&cache_plan.entry_bytes)?;
        let pool = largest.map(|bytes| DecodePool::start(&engine, bytes, cache)).transpose()?;
        let state = Mutex::new(state);
        Ok(Self {
            engine,
            files,
            groups,
            slots,
            classes,
            cache_plan,
            pool,
            state,
            creator: deepnvme_io::mem::CreatorProcess::current(),
        })
    }

    /// Starts to fetch the first groups, while the caller prepares.
    pub fn warm_up(&self) {
        let mut state = self.lock();
        if !state.is_closed {
            self.start_prefetches(&mut state);
        }
    }

    /// Waits until a group is in memory, and returns the offset of its slot in the arena. It stays until it has been
    /// released as often as it was acquired. `None` after the timeout.
    ///
    /// # Errors
    /// `Io`, `Changed`, `Corrupt` and `Panicked` if it cannot be fetched; the next call tries again. `Plan` if an
    /// earlier error lost the memory of a slot; `Busy` if all slots are held; `Closed`.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn acquire(&self, group: usize, timeout: Option<Duration>) -> Result<Option<usize>> {
        let called = Instant::now();
        let deadline = timeout.and_then(|timeout| called.checked_add(timeout));
        let mut has_waited = false;
        loop {
            let handle = {
                let mut state = self.lock();
                if state.is_closed {
                    return Err(Error::Closed);
                }
                self.reap_fetches(&mut state);
                // A failed prefetch is tried again.
                if let Some((_, error)) = state.failures.remove(&group).filter(|(began, _)| *began >= called) {
                    return Err(error);
                }
                let call = state.residency.acquire(group);
                let in_flight = match call {
                    AcquireResult::Held(slot) => {
                        if has_waited {
                            state.stats.waits += 1;
                            state.stats.stalled += called.elapsed();
                        } else {
                            state.stats.hits += 1;
                        }
                        self.start_prefetches(&mut state);
                        return Ok(Some(self.slots[slot].0));
                    }
                    AcquireResult::Fetch(slot) => {
                        self.fetch(&mut state, group, slot, true)?;
                        group
                    }
                    AcquireResult::Wait => group,
                    AcquireResult::AllLoading => state.residency.loading_in_class(group).next().unwrap_or(group),
                    AcquireResult::AllHeld => {
                        return Err(Error::Busy { group, slots: self.classes[self.groups[group].class].slots });
                    }
                };
                match state.in_flight.get(&in_flight) {
                    Some(fetch) => fetch.handle.clone(),
                    None => continue,
                }
            };
            has_waited = true;
            handle.prioritise(self.pool.as_ref());
            let until = deadline.unwrap_or_else(|| Instant::now() + POLL_INTERVAL);
            if !handle.wait_until(until, self.pool.as_ref()) && deadline.is_some() {
                self.lock().stats.stalled += called.elapsed();
                return Ok(None);
            }
        }
    }

    /// Releases a group; on a GPU, once `stream` has reached this point. Returns false if it was not held.
    pub fn release(&self, group: usize, stream: StreamHandle) -> bool {
        let mut state = self.lock();
        let Some(slot) = state.residency.held_slot(group) else {
            return false;
        };
        state.memory.used(slot, stream);
        state.residency.release(group);
        if !state.is_closed {
            self.reap_fetches(&mut state);
            self.start_prefetches(&mut state);
        }
        true
    }

    /// Counters since the streamer was created.
    #[must_use]
    pub fn stats(&self) -> StreamStats {
        let mut state = self.lock();
        self.reap_fetches(&mut state);
        state.stats
    }

    /// The offset and the length of each slot.
    #[must_use]
    pub fn slots(&self) -> &[(usize, usize)] {
        &self.slots
    }

    /// The layer groups.
    #[must_use]
    pub fn groups(&self) -> &[LayerGroup] {
        &self.groups
    }

    /// Stops fetching, and waits for fetches in flight. Acquired memory stays valid.
    pub fn close(&self) {
        let in_flight = {
            let mut state = self.lock();
            state.is_closed = true;
            std::mem::take(&mut state.in_flight)
        };
        for fetch in in_flight.into_values() {
            if let Some(pending) = &fetch.handle.unconverted {
                pending.cancel();
            }
            // The wait is bounded: after a fork, the fetches belong to the parent process, and no thread ends them
            // here.
            fetch.handle.wait_until(Instant::now() + POLL_INTERVAL, None);
        }
    }

    /// The maximum memory for conversions, besides the arena.
    #[must_use]
    pub fn conversion_bytes_max(&self) -> u64 {
        self.pool.as_ref().map_or(0, DecodePool::buffers_bytes)
    }

    /// The memory of the compressed-weight cache.
    #[must_use]
    pub fn cache_bytes(&self) -> u64 {
        self.cache_plan.total()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every critical section leaves the state consistent.
        ignore_poison(self.state.lock())
    }

    fn start_prefetches(&self, state: &mut State) {
        while let Some((group, slot)) = state.residency.next_prefetch() {
            if let Err(error) = self.fetch(state, group, slot, false) {
                tracing::debug!(group, %error, "a layer group could not be prefetched");
            }
        }
    }

    /// Starts to read a group into a slot that is reserved for it.
    fn fetch(&self, state: &mut State, group: usize, slot: usize, is_urgent: bool) -> Result<()> {
        let refused = |state: &mut State, error| {
            state.residency.fetch_failed(group);
            Err(error)
        };
        if let Err(error) = self.check_sources(group) {
            return refused(state, error);
        }
        let Some(memory) = state.memory.take(slot) else {
            let lost = "an error lost the memory of a slot; open the model again";
            return refused(state, Error::Plan(lost.into()));
        };
        let Cut { items, jobs, mut gaps } = self.cut(group, memory);
        let started = Instant::now();
        // A group without bytes needs an empty read, so that its fetch ends.
        let has_unconverted = !items.is_empty() || jobs.is_empty();
        let unconverted = match has_unconverted.then(|| self.engine.try_read_batch(items, is_urgent)).transpose() {
            Ok(unconverted) => unconverted.map(Arc::new),
            Err(Refused { error, memory }) => {
                gaps.extend(memory.into_iter().flatten());
                gaps.extend(jobs.into_iter().map(|job| job.target));
                state.memory.put(slot, join_parts(gaps));
                return refused(state, error.into());
            }
        };
        let task = self.pool.as_ref().filter(|_| !jobs.is_empty()).map(|pool| pool.begin(jobs, is_urgent));
        let handle = FetchHandle { unconverted, task };
        state.in_flight.insert(group, Fetch { handle, slot, gaps, started });
        state.stats.fetches += 1;
        state.stats.fetches_ahead += u64::from(!is_urgent);
        Ok(())
    }

    fn check_sources(&self, group: usize) -> Result<()> {
        let mut checked = usize::MAX;
        for (_, source, _, _) in self.groups[group].placed_ranges() {
            if std::mem::replace(&mut checked, source) != source {
                check_unchanged(&self.files[source])?;
            }
        }
        Ok(())
    }

    /// Splits the memory of a slot into the group's reads, its conversions, and gaps.
    fn cut(&self, group: usize, memory: RegionMut) -> Cut {
        let LayerGroup { pieces, conversions, .. } = &self.groups[group];
        let mut cut = Cut::default();
        let (mut rest, mut at) = (memory, 0);
        for (number, source, from, to) in self.groups[group].placed_ranges() {
            if from > at {
                let (gap, behind) = rest.split_at(from - at);
                cut.gaps.push(gap);
                rest = behind;
            }
            let (target, behind) = rest.split_at(to - from);
            let file = Arc::clone(self.files[source].file());
            match number.checked_sub(pieces.len()) {
                None => cut.items.push(ReadItem { file, offset: pieces[number].offset, target }),
                Some(index) => {
                    let entry = self.cache_plan.entry_of(group, index);
                    cut.jobs.push(DecodeJob { file, conversion: conversions[index], target, entry });
                }
            }
            (rest, at) = (behind, to);
        }
        cut.gaps.push(rest);
        cut
    }

    /// Records all fetches that have ended.
    fn reap_fetches(&self, state: &mut State) {
        let is_done = |fetch: &Fetch| fetch.handle.is_done();
        let ended: Vec<usize> = state.in_flight.iter().filter(|(_, it)| is_done(it)).map(|(group, _)| *group).collect();
        for group in ended {
            let Some(fetch) = state.in_flight.remove(&group) else { continue };
            let (slot, started) = (fetch.slot, fetch.started);
            let Some(completed) = fetch.finish() else { continue };
            state.memory.put(slot, completed.memory);
            match completed.result {
                Ok(FetchCost { bytes_read, reads_finished, converting }) => {
                    state.stats.bytes_read += bytes_read;
                    state.stats.converting += converting;
                    state.stats.disk_busy += state.busy.add(started, reads_finished);
                    state.residency.fetch_completed(group);
                }
                Err(error) => {
                    state.residency.fetch_failed(group);
                    state.failures.insert(group, (started, self.explain_failure(group, error)));
                }
            }
        }
    }

    /// Prefers the error that the file has changed over that of the read.
    fn explain_failure(&self, group: usize, error: Error) -> Error {
        match self.check_sources(group) {
            Err(changed @ Error::Changed { .. }) => changed,
            _ => error,
        }
    }
}

impl Drop for Streamer {
    fn drop(&mut self) {
        if !self.creator.is_current() {
            return; // the fetches belong to the parent process
        }
        let state = ignore_poison(self.state.get_mut());
        // The engine keeps the memory until the reads in flight are done.
        for fetch in state.in_flight.values() {
            if let Some(pending) = &fetch.handle.unconverted {
                pending.cancel();
            }
        }
    }
}

/// The parts of a slot.
#[derive(Default)]
struct Cut {
    items: Vec<ReadItem>,
    jobs: Vec<DecodeJob>,
    gaps: Vec<RegionMut>,
}
