//! Comparing what has come with what was saved, on all processors, while the rest is on its way.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

use deepnvme_format::checksums::{CHUNK_BYTES, Hasher, PartChecksums, RecordChecksums};
use deepnvme_io::GpuAccess;
use deepnvme_io::mem::Region;
use deepnvme_io::mem::sync::ignore_poison;

use super::{Arena, Coverage, Reader};
use crate::crew;
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::sync::{AtomicU64, Instant, Mutex, thread};

/// How much of what is loaded is compared with its sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// Nothing.
    Off,
    /// One cell in [`SAMPLE`], chosen at random, and one at least. Without sums nothing.
    Sample,
    /// As much as [`LOAD_SHARE`] of the load's time allows, and a sample at least: everything, where processors are
    /// faster than the disk. Without sums nothing.
    #[default]
    Auto,
    /// Everything. A file without sums is refused; archives of torch have a CRC-32 for each record.
    Full,
}

/// What a comparison may cost of a load: of the processors' time while bytes arrive, and of the load's own time when they
/// have come.
const LOAD_SHARE: f64 = 0.03;
/// What nobody notices, however short a load is.
const FREE: Duration = Duration::from_micros(100);

/// How many bytes a load has compared with sums, and how many it has not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Compared {
    /// Those that were.
    pub(super) compared: u64,
    /// Those that were not.
    pub(super) skipped: u64,
}

/// What comparing has cost so far, and what it may.
struct Budget {
    began: Instant,
    spent_ns: AtomicU64,
    processors: f64,
}

impl Budget {
    fn new(began: Instant) -> Self {
        let processors = thread::available_parallelism().map_or(1, std::num::NonZero::get) as f64;
        Self { began, spent_ns: AtomicU64::new(0), processors }
    }

    /// While bytes arrive: whether there is time left of the processors' share.
    fn is_left(&self) -> bool {
        let allowed = self.began.elapsed().mul_f64(LOAD_SHARE * self.processors).max(FREE);
        u128::from(self.spent_ns.load(Ordering::Relaxed)) < allowed.as_nanos()
    }

    /// Until when what is left may be compared, once all bytes have come.
    fn deadline(&self) -> Instant {
        Instant::now() + self.began.elapsed().mul_f64(LOAD_SHARE)
    }

    fn spend<T>(&self, mut work: impl FnMut() -> T) -> T {
        let began = Instant::now();
        let done = work();
        self.spent_ns.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        done
    }
}

/// What is copied before it is hashed: it stays in the cache of one core.
pub(super) const STEP_BYTES: u64 = 128 << 10;
/// Of so many cells one is compared in a sample.
pub(super) const SAMPLE: usize = 32;

/// Room for what is hashed at once.
pub(super) fn scratch() -> Vec<u8> {
    vec![0; STEP_BYTES as usize]
}

/// Waits until that part of an arena has come: arena, begin, end.
type Wait<'a> = &'a (dyn Fn(usize, u64, u64) -> Result<()> + Sync);

/// Cells and records compared with their sums, in any order, by any thread.
pub(super) struct Comparison<'a> {
    reader: &'a Reader,
    /// By extent, the sums of its cells, where the whole record has one only.
    parts: Vec<Mutex<Vec<(u64, PartChecksums)>>>,
}

impl Reader {
    /// Whether there is something to compare with.
    pub(crate) fn can_be_audited(&self) -> bool {
        self.has_sums() || self.coverage() == Coverage::Data
    }

    /// Compares the sums of a copy of an extent with what the file says.
    pub(crate) fn compare_sums(&self, index: usize, copy: &RecordChecksums) -> Result<()> {
        let extent = &self.extents()[index];
        let Some(cells) = self.sums(index) else {
            let is_same = extent.crc32.is_none_or(|crc32| crc32 == copy.crc32);
            return if is_same { Ok(()) } else { Err(self.mismatch(extent, 0, extent.bytes, CRC32)) };
        };
        let different = cells.iter().zip(&copy.chunks).position(|(saved, copied)| saved != copied);
        different.map_or(Ok(()), |cell| {
            let start = cell as u64 * CHUNK_BYTES;
            Err(self.mismatch(extent, start, CHUNK_BYTES.min(extent.bytes - start), "CRC-64"))
        })
    }
}

/// What is said of a record's one sum.
const CRC32: &str = "CRC-32; torch.serialization.set_crc32_options(False) leaves wrong ones";

impl<'a> Comparison<'a> {
    /// Of a file that has something to compare with.
    pub(super) fn new(reader: &'a Reader) -> Result<Self> {
        reader.check()?;
        if !reader.can_be_audited() {
            let is_stale = reader.coverage() == Coverage::Stale;
            return Err(Error::NoSums { path: reader.path().to_path_buf(), is_stale });
        }
        let wants_parts = !reader.has_sums();
        let parts = if wants_parts { reader.records.iter().map(|_| Mutex::default()).collect() } else { Vec::new() };
        Ok(Self { reader, parts })
    }

    /// Compares a cell of so many bytes, or notes its sum where only the whole record has one. `step` gives the bytes from
    /// one place of the cell on, as many as fit: they are hashed while they are in the processor's cache.
    pub(super) fn compare(
        &self,
        extent: usize,
        index: u64,
        bytes: u64,
        scratch: &mut [u8],
        step: impl Fn(u64, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let start = index * CHUNK_BYTES;
        let saved = self.reader.sums(extent).map(|cells| cells[index as usize]);
        let mut hasher = if saved.is_some() { Hasher::of_chunks() } else { Hasher::of_records() };
        let mut at = 0;
        while at < bytes {
            let now = &mut scratch[..STEP_BYTES.min(bytes - at) as usize];
            step(at, now)?;
            hasher.update(now);
            at += now.len() as u64;
        }
        let sums = hasher.finish();
        match saved {
            Some(saved) if saved == sums.crc64 => Ok(()),
            Some(_) => Err(self.reader.mismatch(&self.reader.records[extent], start, bytes, "CRC-64")),
            None => {
                ignore_poison(self.parts[extent].lock()).push((start, sums));
                Ok(())
            }
        }
    }

    /// Compares records that have one sum for all.
    pub(super) fn finish(&self) -> Result<()> {
        for (extent, parts) in self.reader.records.iter().zip(&self.parts) {
            let parts = std::mem::take(&mut *ignore_poison(parts.lock()));
            if parts.is_empty() {
                continue;
            }
            let sums = RecordChecksums::from_parts(parts).map_err(|error| Error::format(self.reader.path(), error))?;
            if Some(sums.crc32) != extent.crc32 {
                return Err(self.reader.mismatch(extent, 0, extent.bytes, CRC32));
            }
        }
        Ok(())
    }
}

/// What is to be compared of arenas that are being filled.
pub(super) struct Plan<'a> {
    reader: &'a Reader,
    arenas: &'a [(Arena, Region)],
    access: &'a GpuAccess,
    /// In the order in which they come.
    cells: Vec<Cell>,
    comparison: Option<Comparison<'a>>,
    /// For cells that are compared if there is time.
    budget: Option<Budget>,
    bytes: u64,
}

#[derive(Clone, Copy)]
struct Cell {
    arena: usize,
    extent: usize,
    /// Where in the arena the extent begins.
    at: u64,
    index: u64,
    /// Whether it is compared whatever that costs.
    is_due: bool,
}

impl<'a> Plan<'a> {
    /// Of a load that began then.
    pub(super) fn new(
        reader: &'a Reader,
        arenas: &'a [(Arena, Region)],
        access: &'a GpuAccess,
        verify: Verify,
        began: Instant,
    ) -> Result<Self> {
        let comparison = match verify {
            Verify::Full => Some(Comparison::new(reader)?),
            Verify::Sample | Verify::Auto if reader.has_sums() => Some(Comparison::new(reader)?),
            Verify::Sample | Verify::Auto | Verify::Off => None,
        };
        let members = arenas.iter().enumerate().flat_map(|(arena, (stretch, _))| {
            stretch.members.iter().map(move |member| (arena, member.extent, member.at))
        });
        let bytes = members.clone().map(|(_, extent, _)| reader.records[extent].bytes).sum();
        let mut cells = Vec::new();
        if comparison.is_some() {
            for (arena, extent, at) in members {
                let count = reader.records[extent].bytes.div_ceil(CHUNK_BYTES);
                cells.extend((0..count).map(|index| Cell { arena, extent, at, index, is_due: true }));
            }
        }
        if verify != Verify::Full && !cells.is_empty() {
            let count = cells.len().div_ceil(SAMPLE);
            fastrand::shuffle(&mut cells);
            match verify {
                Verify::Auto => cells[count..].iter_mut().for_each(|cell| cell.is_due = false),
                _ => cells.truncate(count),
            }
            cells.sort_unstable_by_key(|cell| (cell.arena, cell.at, cell.index));
        }
        let budget = (verify == Verify::Auto).then(|| Budget::new(began));
        Ok(Self { reader, arenas, access, cells, comparison, budget, bytes })
    }

    /// Compares what is to be compared; how much that was.
    pub(super) fn run(&self, wait: Wait<'_>, progress: &Progress) -> Result<Compared> {
        let compared = AtomicU64::new(0);
        if let Some(comparison) = &self.comparison {
            self.run_cells(comparison, wait, progress, &compared)?;
            comparison.finish()?;
        }
        let compared = compared.into_inner();
        Ok(Compared { compared, skipped: self.bytes - compared })
    }

    fn run_cells(
        &self,
        comparison: &Comparison<'_>,
        wait: Wait<'_>,
        progress: &Progress,
        compared: &AtomicU64,
    ) -> Result<()> {
        let threads = crew::threads(self.cells.len());
        let compare = |cell: &Cell, scratch: &mut [u8]| {
            let mut work = || self.compare(*cell, comparison, scratch);
            let bytes = match &self.budget {
                Some(budget) => budget.spend(&mut work)?,
                None => work()?,
            };
            compared.fetch_add(bytes, Ordering::Relaxed);
            Ok(())
        };
        let put_off = Mutex::new(Vec::new());
        crew::each(threads, &self.cells, scratch, |scratch, cell| {
            progress.check()?;
            let range = self.range(*cell);
            wait(cell.arena, range.start, range.end)?;
            if cell.is_due || self.budget.as_ref().is_none_or(Budget::is_left) {
                return compare(cell, scratch);
            }
            ignore_poison(put_off.lock()).push(*cell);
            Ok(())
        })?;
        let put_off = ignore_poison(put_off.into_inner());
        let Some(deadline) = self.budget.as_ref().filter(|_| !put_off.is_empty()).map(Budget::deadline) else {
            return Ok(());
        };
        crew::each(threads.min(put_off.len()), &put_off, scratch, |scratch, cell| {
            progress.check()?;
            if Instant::now() < deadline { compare(cell, scratch) } else { Ok(()) }
        })
    }

    /// Where a cell is in its arena.
    fn range(&self, cell: Cell) -> Range<u64> {
        let start = cell.index * CHUNK_BYTES;
        let bytes = CHUNK_BYTES.min(self.reader.records[cell.extent].bytes - start);
        cell.at + start..cell.at + start + bytes
    }

    fn compare(&self, cell: Cell, comparison: &Comparison<'_>, scratch: &mut [u8]) -> Result<u64> {
        let range = self.range(cell);
        let (memory, bytes) = (&self.arenas[cell.arena].1, range.end - range.start);
        comparison.compare(cell.extent, cell.index, bytes, scratch, |at, step| {
            Ok(self.access.copy_to_slice(memory, (range.start + at) as usize, step)?)
        })?;
        Ok(bytes)
    }
}
