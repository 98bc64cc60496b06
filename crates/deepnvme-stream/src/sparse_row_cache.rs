//! Rows of large tensors, of which few are used at a time: rows of an embedding, experts of a layer.

use std::collections::{HashMap, HashSet};
use std::io;
use std::ops::Range;
use std::sync::{Arc, PoisonError};

use deepnvme_codec::Float;
use deepnvme_file::VersionedFile;
use deepnvme_io::mem::ReservedRange;
use deepnvme_io::{Engine, ReadItem};
use deepnvme_rows::{Hold, S3Fifo, hash_row};

use crate::error::{Error, Result, check_unchanged};
use crate::inline_decoder::InlineDecoder;
use crate::layer_group::Conversion;
use crate::stats::StreamStats;
use crate::stored_tensor::StoredTensor;
use crate::sync::{Instant, Mutex};

/// Where the rows of a tensor are on disk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RowLocations {
    /// One after the other.
    Contiguous {
        /// Index of the file.
        source: usize,
        /// Offset of the first row.
        offset: u64,
    },
    /// Pieces of each row, in memory order: file, offset, bytes.
    PerRow(Vec<Vec<(usize, u64, usize)>>),
    /// Ranges of stored tensors, which are converted and form this one.
    Converted {
        /// In the order of its elements.
        ranges: Vec<StoredRange>,
        /// The type of its elements in memory.
        to: Float,
    },
}

/// A range of a stored tensor.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoredRange {
    /// The tensor.
    pub tensor: Arc<StoredTensor>,
    /// The first byte, decoded.
    pub start: usize,
    /// Bytes, decoded.
    pub bytes: usize,
}

/// A tensor whose rows are fetched on demand.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RowTensor {
    /// The number of its first row. Tensors that are used together, such as those of one layer's experts, have the
    /// same.
    pub first_row: usize,
    /// Number of rows.
    pub rows: usize,
    /// Offset of the tensor in the reserved memory.
    pub at: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
    /// Bytes of the tensor; the last row may be shorter.
    pub bytes: usize,
    /// Where its rows are on disk.
    pub locations: RowLocations,
}

/// Keeps rows that are used often in bounded memory, each at its place in the whole tensor.
///
/// The tensors lie in [`ReservedRange`] memory, so they look complete, but only cached rows have memory. Rows are evicted
/// by [`S3Fifo`], as in a `RowStore`. Memory is counted in pages: a page counts once for all rows in it, and is freed with
/// the last of them.
#[derive(Debug)]
pub struct SparseRowCache {
    engine: Arc<Engine>,
    sources: Vec<VersionedFile>,
    tensors: Vec<RowTensor>,
    memory: ReservedRange,
    bytes_max: u64,
    state: Mutex<State>,
}

/// A row in memory.
#[derive(Clone, Copy, Debug)]
struct CachedRow {
    /// Its number in the policy.
    slot: u32,
    /// How many callers hold it.
    holds: u32,
}

#[derive(Debug)]
struct State {
    /// The number of cached rows in each page, counted once per tensor. Page and row numbers count from the start of
    /// this cache's memory, so they never refer to other memory.
    pages: HashMap<usize, u32>,
    cached: HashMap<usize, CachedRow>,
    policy: S3Fifo,
    /// The row of each slot.
    rows: Vec<usize>,
    free_slots: Vec<u32>,
    stats: StreamStats,
    decoder: InlineDecoder,
}

impl State {
    fn new(slots: usize) -> Self {
        Self {
            pages: HashMap::new(),
            cached: HashMap::new(),
            policy: S3Fifo::new(slots),
            rows: vec![0; slots],
            free_slots: (0..slots as u32).rev().collect(),
            stats: StreamStats::default(),
            decoder: InlineDecoder::default(),
        }
    }

    /// Counts a use of a row that is in memory, and holds it.
    fn hold(&mut self, row: usize) {
        if let Some(cached) = self.cached.get_mut(&row) {
            cached.holds += 1;
            self.policy.touch(cached.slot);
            return;
        }
        // There is a slot for each row that the memory may hold.
        let Some(slot) = self.free_slots.pop() else { return };
        self.rows[slot as usize] = row;
        self.policy.insert(slot, hash_row(row as u64), false);
        self.cached.insert(row, CachedRow { slot, holds: 1 });
    }

    /// Removes the row that is least worth keeping. Rows that callers hold, or that are `wanted`, stay.
    fn evict(&mut self, wanted: &[usize]) -> Option<usize> {
        let Self { policy, rows, cached, .. } = self;
        let hold_of = |slot: u32| {
            let row = rows[slot as usize];
            let is_held = wanted.binary_search(&row).is_ok() || cached.get(&row).is_some_and(|cached| cached.holds > 0);
            if is_held { Hold::Now } else { Hold::None }
        };
        let slot = policy.evict(|slot| hash_row(rows[slot as usize] as u64), hold_of)?;
        let row = rows[slot as usize];
        cached.remove(&row);
        self.free_slots.push(slot);
        Some(row)
    }
}

impl SparseRowCache {
    /// `bytes_max` bounds the memory of cached rows.
    ///
    /// # Errors
    /// `Plan` if a tensor exceeds the memory, or lacks a location for some row.
    pub fn new(
        engine: Arc<Engine>,
        sources: Vec<VersionedFile>,
        tensors: Vec<RowTensor>,
        memory: ReservedRange,
        bytes_max: u64,
    ) -> Result<Self> {
        for (index, tensor) in tensors.iter().enumerate() {
            let end = tensor.at.checked_add(tensor.bytes);
            let is_whole = tensor.row_bytes > 0 && tensor.bytes.div_ceil(tensor.row_bytes) == tensor.rows;
            let fits = is_whole && end.is_some_and(|end| end <= memory.bytes());
            let has_locations = match &tensor.locations {
                RowLocations::Contiguous { source, .. } => *source < sources.len(),
                RowLocations::Converted { ranges, to } => {
                    let elements = |range: &StoredRange| range.bytes / range.tensor.float.bytes();
                    let is_there = |range: &StoredRange| {
                        let end = range.start.checked_add(range.bytes);
                        let known = range.tensor.source < sources.len() && range.tensor.check().is_ok();
                        known && end.is_some_and(|end| range.tensor.check_end(end).is_ok())
                    };
                    tensor.row_bytes.is_multiple_of(to.bytes())
                        && ranges.iter().map(elements).sum::<usize>() * to.bytes() == tensor.bytes
                        && ranges.iter().all(is_there)
                }
                RowLocations::PerRow(each) => {
                    each.len() == tensor.rows
                        && tensor.bytes.is_multiple_of(tensor.row_bytes)
                        && each.iter().all(|pieces| {
                            pieces.iter().map(|piece| piece.2).sum::<usize>() == tensor.row_bytes
                                && pieces.iter().all(|piece| piece.0 < sources.len())
                        })
                }
            };
            if !fits || !has_locations {
                return Err(Error::Plan(format!("tensor {index} does not fit its memory or files")));
            }
        }
        let slots = slots_max(&tensors, memory.page_bytes(), bytes_max);
        Ok(Self { engine, sources, tensors, memory, bytes_max, state: Mutex::new(State::new(slots)) })
    }

    /// The tensors that contain a row.
    fn tensors_of(&self, row: usize) -> impl Iterator<Item = &RowTensor> {
        self.tensors.iter().filter(move |tensor| (tensor.first_row..tensor.first_row + tensor.rows).contains(&row))
    }

    /// The pages of a row, tensor by tensor; a page in several tensors occurs several times.
    fn pages_of(&self, row: usize) -> impl Iterator<Item = usize> {
        let page_bytes = self.memory.page_bytes();
        let pages = move |range: Range<usize>| range.start / page_bytes..range.end.div_ceil(page_bytes);
        self.tensors_of(row).flat_map(move |tensor| pages(bytes_of(tensor, row)))
    }

    fn bytes(&self, pages: usize) -> u64 {
        pages as u64 * self.memory.page_bytes() as u64
    }

    /// Counts the pages of a row as in use.
    fn count_pages(&self, state: &mut State, row: usize) {
        self.pages_of(row).for_each(|page| *state.pages.entry(page).or_default() += 1);
    }

    /// Frees the pages that only this row used.
    fn free_pages(&self, state: &mut State, row: usize) {
        let page_bytes = self.memory.page_bytes();
        let mut free: Vec<usize> = Vec::new();
        for page in self.pages_of(row) {
            if let Some(count) = state.pages.get_mut(&page) {
                *count -= 1;
                if *count == 0 {
                    state.pages.remove(&page);
                    free.push(page);
                }
            }
        }
        free.sort_unstable();
        for run in free.chunk_by(|one, next| one + 1 == *next) {
            let end = ((run[0] + run.len()) * page_bytes).min(self.memory.bytes());
            self.memory.discard(run[0] * page_bytes..end);
        }
    }

    /// Waits until all these rows are in memory. They stay until they have been released as often as they were
    /// acquired.
    ///
    /// # Errors
    /// `Io`, `Changed` and `Corrupt` if they cannot be fetched; `TooMany` if they exceed the bound, alone or together
    /// with the rows that are held; `Plan` for a row that does not exist.
    pub fn acquire(&self, rows: &[usize]) -> Result<()> {
        let called = Instant::now();
        let mut rows = rows.to_vec();
        rows.sort_unstable();
        rows.dedup();
        if let Some(row) = rows.iter().find(|row| self.tensors_of(**row).next().is_none()) {
            return Err(Error::Plan(format!("row {row} does not exist")));
        }
        let pages: HashSet<usize> = rows.iter().flat_map(|row| self.pages_of(*row)).collect();
        let bytes = self.bytes(pages.len());
        if bytes > self.bytes_max {
            return Err(Error::TooMany { bytes, bytes_max: self.bytes_max });
        }
        // The lock is held during the reads, so that no other caller evicts these rows.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let missing: Vec<usize> = rows.iter().copied().filter(|row| !state.cached.contains_key(row)).collect();
        state.stats.hits += (rows.len() - missing.len()) as u64;
        state.stats.waits += missing.len() as u64;
        missing.iter().for_each(|row| self.count_pages(&mut state, *row));
        let fetched = self
            .evict_rows(&mut state, &rows)
            .and_then(|()| if missing.is_empty() { Ok(()) } else { self.fetch(&mut state, &missing) });
        if let Err(error) = fetched {
            // Rows that did arrive are freed as well.
            missing.iter().for_each(|row| self.free_pages(&mut state, *row));
            return Err(error);
        }
        if !missing.is_empty() {
            state.stats.stalled += called.elapsed();
        }
        rows.into_iter().for_each(|row| state.hold(row));
        Ok(())
    }

    /// Releases these rows, each once.
    pub fn release(&self, rows: &[usize]) {
        let mut rows = rows.to_vec();
        rows.sort_unstable();
        rows.dedup();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        for row in rows {
            if let Some(cached) = state.cached.get_mut(&row) {
                cached.holds = cached.holds.saturating_sub(1);
            }
        }
    }

    /// Returns whether a row of the tensors that contain `row` was used while it was not in memory, and so read as zeros.
    /// Each use is found once.
    ///
    /// A use is found if it touched a page without cached rows. So it is found for rows of two pages or more, wherever
    /// they start, unless the use was restricted to their ends. `deepnvme_io::mem::sees_used_pages` says whether uses
    /// can be found here at all.
    ///
    /// # Errors
    /// That of `mincore`.
    pub fn was_missing_row_used(&self, row: usize) -> io::Result<bool> {
        // The lock keeps rows from being fetched or evicted meanwhile.
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let page_bytes = self.memory.page_bytes();
        let mut is_used = false;
        for tensor in self.tensors_of(row) {
            let rows = tensor.first_row..tensor.first_row + tensor.rows;
            let mut from = rows.start;
            while let Some(first) = (from..rows.end).find(|row| !state.cached.contains_key(row)) {
                from = (first..rows.end).find(|row| state.cached.contains_key(row)).unwrap_or(rows.end);
                let (start, end) = (bytes_of(tensor, first).start, bytes_of(tensor, from - 1).end);
                // Only the pages at both ends may contain cached rows as well.
                let mut pages = start / page_bytes..end.div_ceil(page_bytes);
                while pages.start < pages.end && state.pages.contains_key(&pages.start) {
                    pages.start += 1;
                }
                while pages.start < pages.end && state.pages.contains_key(&(pages.end - 1)) {
                    pages.end -= 1;
                }
                let free = pages.start * page_bytes..(pages.end * page_bytes).min(self.memory.bytes());
                if free.is_empty() {
                    continue;
                }
                if self.memory.first_used_page(free.clone())?.is_some() {
                    self.memory.discard(free);
                    is_used = true;
                }
            }
        }
        Ok(is_used)
    }

    /// Counters since the cache was created; hits and waits count rows.
    #[must_use]
    pub fn stats(&self) -> StreamStats {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).stats
    }

    /// Evicts rows that no caller holds, until the memory is within the bound.
    fn evict_rows(&self, state: &mut State, rows: &[usize]) -> Result<()> {
        while self.bytes(state.pages.len()) > self.bytes_max {
            match state.evict(rows) {
                Some(row) => self.free_pages(state, row),
                None => return Err(Error::TooMany { bytes: self.bytes(state.pages.len()), bytes_max: self.bytes_max }),
            }
        }
        Ok(())
    }

    fn fetch(&self, state: &mut State, missing: &[usize]) -> Result<()> {
        let mut reads = Vec::with_capacity(missing.len() * self.tensors.len());
        let mut conversions = Vec::new();
        let mut used = vec![false; self.sources.len()];
        for row in missing {
            for tensor in self.tensors_of(*row) {
                let (place, index) = (bytes_of(tensor, *row), *row - tensor.first_row);
                let mut read = |source: usize, offset: u64, place: Range<usize>| {
                    used[source] = true;
                    let file = Arc::clone(self.sources[source].file());
                    reads.push(ReadItem { file, offset, target: self.memory.region_mut(place) });
                };
                match &tensor.locations {
                    RowLocations::Contiguous { source, offset } => {
                        read(*source, offset + (index * tensor.row_bytes) as u64, place);
                    }
                    RowLocations::Converted { ranges, to } => {
                        let begin = place.start - tensor.at;
                        for conversion in conversions_of(ranges, *to, begin..begin + place.len(), place.start)? {
                            used[conversion.source] = true;
                            conversions.push(conversion);
                        }
                    }
                    RowLocations::PerRow(each) => {
                        let mut at = place.start;
                        for (source, offset, bytes) in &each[index] {
                            read(*source, *offset, at..at + bytes);
                            at += bytes;
                        }
                    }
                }
            }
        }
        for (source, _) in self.sources.iter().zip(used).filter(|(_, used)| *used) {
            check_unchanged(source)?;
        }
        let started = Instant::now();
        if !reads.is_empty() {
            let transfer = self.engine.read_batch(reads)?.wait().1?;
            state.stats.bytes_read += transfer.bytes;
            state.stats.disk_busy += transfer.finished.saturating_duration_since(started);
        }
        if !conversions.is_empty() {
            let cost = state.decoder.run(&self.engine, &self.sources, conversions, &self.memory)?;
            state.stats.bytes_read += cost.bytes;
            state.stats.disk_busy += cost.disk_busy;
            state.stats.converting += cost.converting;
        }
        state.stats.fetches += missing.len() as u64;
        Ok(())
    }
}

/// The most rows that memory of this size holds: as many as fit into its pages, and one at the start of each.
fn slots_max(tensors: &[RowTensor], page_bytes: usize, bytes_max: u64) -> usize {
    let rows = tensors.iter().map(|tensor| tensor.first_row + tensor.rows).max().unwrap_or(0);
    let row_bytes_min = tensors.iter().map(|tensor| tensor.row_bytes).min().unwrap_or(1);
    let pages = bytes_max / page_bytes as u64;
    rows.min(usize::try_from(pages.saturating_mul((page_bytes / row_bytes_min) as u64 + 2)).unwrap_or(usize::MAX))
}

/// The conversions that load a range of the tensor to the offset `at`.
fn conversions_of(ranges: &[StoredRange], to: Float, wanted: Range<usize>, at: usize) -> Result<Vec<Conversion>> {
    let (mut begin, mut found) = (0, Vec::new());
    for StoredRange { tensor, start, bytes } in ranges {
        let element_bytes = tensor.float.bytes();
        let end = begin + bytes / element_bytes * to.bytes();
        let (from, until) = (wanted.start.max(begin), wanted.end.min(end));
        if from < until {
            let decoded = |place: usize| start + (place - begin) / to.bytes() * element_bytes;
            found.extend(tensor.conversions(decoded(from)..decoded(until), at + from - wanted.start, to)?);
        }
        begin = end;
    }
    Ok(found)
}

fn bytes_of(tensor: &RowTensor, row: usize) -> Range<usize> {
    let start = (row - tensor.first_row) * tensor.row_bytes;
    tensor.at + start..tensor.at + (start + tensor.row_bytes).min(tensor.bytes)
}
