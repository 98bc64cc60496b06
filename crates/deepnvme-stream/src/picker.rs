//! Items of a long tensor, of which a few are picked at a time: rows of an embedding, experts of a layer.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use deepnvme_codec::Float;
use deepnvme_io::mem::Reserved;
use deepnvme_io::mem::sync::ignore_poison;
use deepnvme_io::{Engine, ReadItem};

use crate::error::{Error, Result};
use crate::gather::Gather;
use crate::source::Source;
use crate::stats::StreamStats;
use crate::stored::Stored;
use crate::sync::{Instant, Mutex};
use crate::unit::Conversion;

/// Where in the files the items of one tensor lie.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Places {
    /// One behind the other.
    Rows {
        /// Which of the sources.
        source: usize,
        /// Where the first begins.
        offset: u64,
    },
    /// Each in pieces of its own, in the order in which they lie in memory: source, offset, bytes.
    Each(Vec<Vec<(usize, u64, usize)>>),
    /// In another form than in memory: the tensor is these stretches, one behind the other.
    Stored {
        /// In the order of its elements.
        stretches: Vec<Stretch>,
        /// The type of its elements in memory.
        to: Float,
    },
}

/// Some of the bytes of a tensor in another form.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stretch {
    /// The tensor.
    pub stored: Arc<Stored>,
    /// The first byte, decoded.
    pub start: usize,
    /// How many, decoded.
    pub bytes: usize,
}

/// One tensor whose first dimension is picked from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Part {
    /// The item that its first row is of. Tensors that are picked together, as those of one layer's experts, have the same.
    pub first: usize,
    /// How many items it has.
    pub items: usize,
    /// Where in the reserved memory the tensor begins.
    pub at: usize,
    /// Bytes of an item.
    pub item_bytes: usize,
    /// Bytes of the tensor: the last item may be shorter.
    pub bytes: usize,
    /// Where the items are.
    pub places: Places,
}

/// Keeps the items that were picked lately in memory of a bound, at the places that they have in the whole tensor.
///
/// The tensors lie in [`Reserved`] memory, so that they look whole; only items that were picked have bytes. Where there is
/// no room for what is picked next, the items go that were picked least often, then those that were picked longest ago.
/// Memory comes in pages: each page that an item has bytes in counts as a whole one, once for all items in it, and is given
/// back with the last of them.
#[derive(Debug)]
pub struct Picker {
    engine: Arc<Engine>,
    sources: Vec<Source>,
    parts: Vec<Part>,
    memory: Reserved,
    bytes_max: u64,
    state: Mutex<State>,
}

/// An item in memory.
#[derive(Clone, Copy, Debug, Default)]
struct Kept {
    /// How often it was picked.
    uses: u32,
    /// By which pick last.
    last: u64,
    /// By how many who have not released it.
    holds: u32,
}

#[derive(Debug, Default)]
struct State {
    /// The pages with memory, and how many parts of items are in each. Pages are counted from the beginning of the picker's
    /// own memory, and items from its first one: neither is an address, so that none can come to mean something else.
    pages: HashMap<usize, u32>,
    kept: HashMap<usize, Kept>,
    picks: u64,
    stats: StreamStats,
    gather: Gather,
}

impl Picker {
    /// `bytes_max` bounds what is in memory at a time.
    ///
    /// # Errors
    /// `Plan` where a part is not inside the memory, or has not a place for each item.
    pub fn new(
        engine: Arc<Engine>,
        sources: Vec<Source>,
        parts: Vec<Part>,
        memory: Reserved,
        bytes_max: u64,
    ) -> Result<Self> {
        for (index, part) in parts.iter().enumerate() {
            let end = part.at.checked_add(part.bytes);
            let is_whole = part.item_bytes > 0 && part.bytes.div_ceil(part.item_bytes) == part.items;
            let fits = is_whole && end.is_some_and(|end| end <= memory.len());
            let is_placed = match &part.places {
                Places::Rows { source, .. } => *source < sources.len(),
                Places::Stored { stretches, to } => {
                    let elements = |stretch: &Stretch| stretch.bytes / stretch.stored.float.bytes();
                    let is_there = |stretch: &Stretch| {
                        let end = stretch.start.checked_add(stretch.bytes);
                        let known = stretch.stored.source < sources.len() && stretch.stored.check().is_ok();
                        known && end.is_some_and(|end| stretch.stored.conversions(end..end, 0, *to).is_ok())
                    };
                    part.item_bytes.is_multiple_of(to.bytes())
                        && stretches.iter().map(elements).sum::<usize>() * to.bytes() == part.bytes
                        && stretches.iter().all(is_there)
                }
                Places::Each(each) => {
                    each.len() == part.items
                        && part.bytes.is_multiple_of(part.item_bytes)
                        && each.iter().all(|pieces| {
                            pieces.iter().map(|piece| piece.2).sum::<usize>() == part.item_bytes
                                && pieces.iter().all(|piece| piece.0 < sources.len())
                        })
                }
            };
            if !fits || !is_placed {
                return Err(Error::Plan(format!(
                    "part {index} of what is picked from does not fit its memory or files"
                )));
            }
        }
        Ok(Self { engine, sources, parts, memory, bytes_max, state: Mutex::default() })
    }

    /// The tensors that have an item.
    fn parts_of(&self, item: usize) -> impl Iterator<Item = &Part> {
        self.parts.iter().filter(move |part| (part.first..part.first + part.items).contains(&item))
    }

    /// The pages of an item, part by part: one that several parts are in comes several times.
    fn pages_of(&self, item: usize) -> impl Iterator<Item = usize> {
        let page_bytes = self.memory.page_bytes();
        let pages = move |range: Range<usize>| range.start / page_bytes..range.end.div_ceil(page_bytes);
        self.parts_of(item).flat_map(move |part| pages(range(part, item)))
    }

    fn bytes(&self, pages: usize) -> u64 {
        pages as u64 * self.memory.page_bytes() as u64
    }

    /// Counts the pages of an item as in use.
    fn charge(&self, state: &mut State, item: usize) {
        self.pages_of(item).for_each(|page| *state.pages.entry(page).or_default() += 1);
    }

    /// Gives back the pages that only this item was in.
    fn give_back(&self, state: &mut State, item: usize) {
        let page_bytes = self.memory.page_bytes();
        let mut free: Vec<usize> = Vec::new();
        for page in self.pages_of(item) {
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
            let end = ((run[0] + run.len()) * page_bytes).min(self.memory.len());
            self.memory.discard(run[0] * page_bytes..end);
        }
    }

    /// Waits until all these items are in memory. They stay until they are released, as often as they were picked.
    ///
    /// # Errors
    /// `Io` and `Changed` where they cannot be fetched; `TooMany` where they are more than the bound; `Plan` for an item that
    /// there is not.
    pub fn pick(&self, picked: &[usize]) -> Result<()> {
        let called = Instant::now();
        let mut picked = picked.to_vec();
        picked.sort_unstable();
        picked.dedup();
        if let Some(item) = picked.iter().find(|item| self.parts_of(**item).next().is_none()) {
            return Err(Error::Plan(format!("item {item} is picked, and there is no such item")));
        }
        let pages: HashSet<usize> = picked.iter().flat_map(|item| self.pages_of(*item)).collect();
        let bytes = self.bytes(pages.len());
        if bytes > self.bytes_max {
            return Err(Error::TooMany { bytes, bytes_max: self.bytes_max });
        }
        // Held while the disk is waited for: somebody else might give back what was just picked.
        let mut state = ignore_poison(self.state.lock());
        state.picks += 1;
        let now = state.picks;
        let missing: Vec<usize> = picked.iter().copied().filter(|item| !state.kept.contains_key(item)).collect();
        state.stats.hits += (picked.len() - missing.len()) as u64;
        state.stats.waits += missing.len() as u64;
        missing.iter().for_each(|item| self.charge(&mut state, *item));
        let fetched = self
            .make_room(&mut state, &picked)
            .and_then(|()| if missing.is_empty() { Ok(()) } else { self.fetch(&mut state, &missing) });
        if let Err(error) = fetched {
            // Also what has come of them is in nobody's way.
            missing.iter().for_each(|item| self.give_back(&mut state, *item));
            return Err(error);
        }
        if !missing.is_empty() {
            state.stats.stalled += called.elapsed();
        }
        for item in picked {
            let kept = state.kept.entry(item).or_default();
            *kept = Kept { uses: kept.uses.saturating_add(1), last: now, holds: kept.holds + 1 };
        }
        Ok(())
    }

    /// Whoever picked these items needs them no more.
    pub fn release(&self, picked: &[usize]) {
        let mut picked = picked.to_vec();
        picked.sort_unstable();
        picked.dedup();
        let mut state = ignore_poison(self.state.lock());
        for item in picked {
            if let Some(kept) = state.kept.get_mut(&item) {
                kept.holds = kept.holds.saturating_sub(1);
            }
        }
    }

    /// What it has cost so far: hits and waits are items.
    #[must_use]
    pub fn stats(&self) -> StreamStats {
        ignore_poison(self.state.lock()).stats
    }

    /// Has items go that nobody holds, until all that is counted is within the bound.
    fn make_room(&self, state: &mut State, picked: &[usize]) -> Result<()> {
        let is_over = |state: &State| self.bytes(state.pages.len()) > self.bytes_max;
        if !is_over(state) {
            return Ok(());
        }
        let may_go = |(item, kept): &(&usize, &Kept)| kept.holds == 0 && picked.binary_search(item).is_err();
        let others = state.kept.iter().filter(may_go).map(|(item, kept)| (kept.uses, kept.last, *item));
        let mut others: Vec<(u32, u64, usize)> = others.collect();
        others.sort_unstable();
        for (_, _, item) in others {
            if !is_over(state) {
                break;
            }
            state.kept.remove(&item);
            self.give_back(state, item);
        }
        if is_over(state) {
            return Err(Error::TooMany { bytes: self.bytes(state.pages.len()), bytes_max: self.bytes_max });
        }
        // What was hot long ago cools down.
        state.kept.values_mut().for_each(|kept| kept.uses = (kept.uses / 2).max(1));
        Ok(())
    }

    fn fetch(&self, state: &mut State, missing: &[usize]) -> Result<()> {
        let mut items = Vec::with_capacity(missing.len() * self.parts.len());
        let mut conversions = Vec::new();
        let mut used = vec![false; self.sources.len()];
        for item in missing {
            for part in self.parts_of(*item) {
                let (place, index) = (range(part, *item), *item - part.first);
                let mut read = |source: usize, offset: u64, place: Range<usize>| {
                    used[source] = true;
                    let file = Arc::clone(self.sources[source].file());
                    items.push(ReadItem { file, offset, target: self.memory.region_mut(place) });
                };
                match &part.places {
                    Places::Rows { source, offset } => {
                        read(*source, offset + (index * part.item_bytes) as u64, place);
                    }
                    Places::Stored { stretches, to } => {
                        let begin = place.start - part.at;
                        for conversion in of(stretches, *to, begin..begin + place.len(), place.start)? {
                            used[conversion.source] = true;
                            conversions.push(conversion);
                        }
                    }
                    Places::Each(each) => {
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
            source.check()?;
        }
        let started = Instant::now();
        if !items.is_empty() {
            let transfer = self.engine.read_batch(items)?.wait().1?;
            state.stats.bytes_read += transfer.bytes;
            state.stats.disk_busy += transfer.finished.saturating_duration_since(started);
        }
        if !conversions.is_empty() {
            let gathered = state.gather.run(&self.engine, &self.sources, conversions, &self.memory)?;
            state.stats.bytes_read += gathered.bytes;
            state.stats.disk_busy += gathered.disk_busy;
            state.stats.converting += gathered.converting;
        }
        state.stats.fetches += missing.len() as u64;
        Ok(())
    }
}

/// What brings a range of the bytes that stretches are in memory to `at`.
fn of(stretches: &[Stretch], to: Float, wanted: Range<usize>, at: usize) -> Result<Vec<Conversion>> {
    let (mut begin, mut found) = (0, Vec::new());
    for Stretch { stored, start, bytes } in stretches {
        let item = stored.float.bytes();
        let end = begin + bytes / item * to.bytes();
        let (from, until) = (wanted.start.max(begin), wanted.end.min(end));
        if from < until {
            let decoded = |place: usize| start + (place - begin) / to.bytes() * item;
            found.extend(stored.conversions(decoded(from)..decoded(until), at + from - wanted.start, to)?);
        }
        begin = end;
    }
    Ok(found)
}

fn range(part: &Part, item: usize) -> Range<usize> {
    let start = (item - part.first) * part.item_bytes;
    part.at + start..part.at + (start + part.item_bytes).min(part.bytes)
}
