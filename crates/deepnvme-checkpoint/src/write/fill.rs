//! One piece of the file, put together in a slot and hashed while it is in the processor's cache.

use std::ops::Range;
use std::sync::{Mutex, OnceLock, PoisonError};

use deepnvme_format::sums::{CELL_BYTES, Hasher, PartSums, RecordSums};
use deepnvme_format::{LARGE_BYTES, Result};
use deepnvme_io::mem::{Region, Slot};

use super::spans::{Content, Spans};

/// What is copied before it is hashed: it stays in the cache of one core.
const STEP_BYTES: u64 = 128 << 10;

/// What a file's headers say when the sums are known.
pub(crate) trait Layout: Sync {
    /// The header of a record.
    fn header(&self, record: usize, crc32: u32) -> Vec<u8>;
    /// What holds all sums.
    fn index(&self, sums: &[RecordSums]) -> Vec<u8>;
}

/// A record's bytes, and their sums as they become known.
pub(crate) struct Source {
    memory: Region,
    parts: Mutex<Vec<(u64, PartSums)>>,
    /// Of a record that is small, or has been finished.
    sums: OnceLock<RecordSums>,
}

impl Source {
    pub(crate) fn new(memory: Region) -> Self {
        Self { memory, parts: Mutex::default(), sums: OnceLock::new() }
    }

    fn bytes(&self) -> u64 {
        self.memory.len() as u64
    }

    /// Whether its sum is not computed in parts.
    pub(crate) fn is_small(&self) -> bool {
        self.bytes() < LARGE_BYTES
    }

    fn note(&self, offset: u64, part: PartSums) {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner).push((offset, part));
    }

    /// The sums of a small record, whose bytes are read for that where nobody has done it yet.
    fn small_sums(&self) -> &RecordSums {
        self.sums.get_or_init(|| {
            let mut bytes = vec![0; self.memory.len()];
            self.memory.copy_to_slice(0, &mut bytes);
            one_part(deepnvme_format::sums::sums_of(&bytes))
        })
    }

    /// Joins the parts, all of which are there.
    fn finish(&self) -> Result<&RecordSums> {
        if self.is_small() {
            return Ok(self.small_sums());
        }
        let parts = std::mem::take(&mut *self.parts.lock().unwrap_or_else(PoisonError::into_inner));
        if self.sums.get().is_none() {
            let sums = RecordSums::from_parts(parts)?;
            return Ok(self.sums.get_or_init(|| sums));
        }
        Ok(self.small_sums())
    }
}

fn one_part(sums: PartSums) -> RecordSums {
    RecordSums { crc32: sums.crc32, cells: if sums.bytes > 0 { vec![sums.crc64] } else { Vec::new() } }
}

/// All that pieces are made of.
pub(crate) struct Filler<'a> {
    pub(crate) spans: &'a Spans,
    pub(crate) sources: &'a [Source],
    pub(crate) layout: &'a dyn Layout,
    /// When all is known but what it holds itself.
    pub(crate) index: OnceLock<Vec<u8>>,
}

impl Filler<'_> {
    /// Puts a piece together at the beginning of a slot.
    pub(crate) fn fill(&self, piece: &Range<u64>, slot: &mut Slot) {
        let spans = self.spans.within(piece);
        // Records first: a small record is hashed where it has just been copied to, and its header follows.
        for span in spans {
            let (range, at) = overlap(span.offset..span.end(), piece);
            match span.content {
                Content::Record(record) => {
                    let within = range.start - span.offset..range.end - span.offset;
                    self.copy(&self.sources[record], within, at as usize, slot);
                }
                Content::Gap => slot.as_mut_slice()[at as usize..][..(range.end - range.start) as usize].fill(0),
                Content::Header(_) | Content::Index => {}
            }
        }
        for span in spans {
            let (range, at) = overlap(span.offset..span.end(), piece);
            let within = (range.start - span.offset) as usize..(range.end - span.offset) as usize;
            let target = &mut slot.as_mut_slice()[at as usize..][..within.len()];
            match span.content {
                Content::Header(record) => {
                    let source = &self.sources[record];
                    let crc32 = if source.is_small() {
                        source.small_sums().crc32
                    } else {
                        source.sums.get().map_or(0, |sums| sums.crc32)
                    };
                    target.copy_from_slice(&self.layout.header(record, crc32)[within]);
                }
                Content::Index => target.copy_from_slice(&self.index.get().map_or(&[][..], Vec::as_slice)[within]),
                Content::Record(_) | Content::Gap => {}
            }
        }
    }

    /// Copies a part of a record into the slot, and hashes it there.
    fn copy(&self, source: &Source, range: Range<u64>, at: usize, slot: &mut Slot) {
        let is_whole = range == (0..source.bytes());
        for cell in cut(&range, CELL_BYTES) {
            let mut hasher = Hasher::default();
            for step in cut(&cell, STEP_BYTES) {
                let (to, len) = (at + (step.start - range.start) as usize, (step.end - step.start) as usize);
                slot.gather(to, &source.memory, step.start as usize, len);
                if !source.is_small() || is_whole {
                    hasher.update(&slot.as_slice()[to..to + len]);
                }
            }
            if !source.is_small() {
                source.note(cell.start, hasher.finish());
            } else if is_whole {
                let _ = source.sums.set(one_part(hasher.finish()));
            }
        }
    }

    /// Hashes what late pieces hold of large records: headers need the sums before those pieces are put together.
    pub(crate) fn hash_late(&self, pieces: &[Range<u64>]) {
        let mut scratch = Vec::new();
        for piece in pieces {
            for span in self.spans.within(piece) {
                let Content::Record(record) = span.content else { continue };
                let source = &self.sources[record];
                let (range, _) = overlap(span.offset..span.end(), piece);
                if source.is_small() {
                    continue;
                }
                for cell in cut(&(range.start - span.offset..range.end - span.offset), CELL_BYTES) {
                    scratch.resize((cell.end - cell.start) as usize, 0);
                    source.memory.copy_to_slice(cell.start as usize, &mut scratch);
                    source.note(cell.start, deepnvme_format::sums::sums_of(&scratch));
                }
            }
        }
    }

    /// Joins all sums, and makes the index of them.
    pub(crate) fn finish_sums(&self) -> Result<()> {
        let sums: Vec<RecordSums> =
            self.sources.iter().map(|source| source.finish().cloned()).collect::<Result<_>>()?;
        let _ = self.index.set(self.layout.index(&sums));
        Ok(())
    }
}

/// What two ranges have in common, and where that begins in the piece.
fn overlap(span: Range<u64>, piece: &Range<u64>) -> (Range<u64>, u64) {
    let range = span.start.max(piece.start)..span.end.min(piece.end);
    let at = range.start - piece.start;
    (range, at)
}

/// Cuts a range at the multiples of `every`.
fn cut(range: &Range<u64>, every: u64) -> impl Iterator<Item = Range<u64>> + use<> {
    let (mut at, end) = (range.start, range.end);
    std::iter::from_fn(move || {
        if at == end {
            return None;
        }
        let next = ((at / every + 1) * every).min(end);
        Some(std::mem::replace(&mut at, next)..next)
    })
}
