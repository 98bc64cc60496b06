//! Comparing loaded data with its checksums on all cores, while the rest is still being read.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

use deepnvme_format::checksums::{CHUNK_BYTES, Hasher, PartChecksums, RecordChecksums};
use deepnvme_io::GpuAccess;
use deepnvme_io::mem::Region;
use deepnvme_io::mem::sync::ignore_poison;

use super::{Arena, Coverage, Reader};
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::sync::{AtomicU64, Instant, Mutex, thread};
use crate::work_queue;

/// How much of the loaded data to compare with checksums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// Nothing.
    Off,
    /// One chunk in [`SAMPLE`], chosen at random, and at least one. Without checksums nothing.
    Sample,
    /// At least a sample, and as much as [`LOAD_SHARE`] of the load's time allows: everything if the processors are
    /// faster than the disk. Without checksums nothing.
    #[default]
    Auto,
    /// Everything. A file without checksums is refused. Torch archives have a CRC-32 for each record.
    Full,
}

/// The share of a load's cost that verification may use: of the CPU time while data arrives, and of the load's own time
/// afterwards.
const LOAD_SHARE: f64 = 0.03;
/// Always allowed: too short to notice.
const FREE: Duration = Duration::from_micros(100);

/// The bytes of a load that were compared with checksums, and those that were not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Compared {
    /// Bytes compared.
    pub(super) compared: u64,
    /// Bytes skipped.
    pub(super) skipped: u64,
}

/// The time that verification has used, and its limit.
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

    /// Returns whether CPU time is left while data arrives.
    fn is_left(&self) -> bool {
        let allowed = self.began.elapsed().mul_f64(LOAD_SHARE * self.processors).max(FREE);
        u128::from(self.spent_ns.load(Ordering::Relaxed)) < allowed.as_nanos()
    }

    /// The deadline for the remaining chunks once all data has arrived.
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

/// Bytes copied and then hashed at a time, small enough for the cache of one core.
pub(super) const STEP_BYTES: u64 = 128 << 10;
/// A sample compares one chunk in this many.
pub(super) const SAMPLE: usize = 32;

/// Allocates the buffer of one hashing thread.
pub(super) fn scratch() -> Vec<u8> {
    vec![0; STEP_BYTES as usize]
}

/// Waits for a range of an arena: arena, start, end.
type Wait<'a> = &'a (dyn Fn(usize, u64, u64) -> Result<()> + Sync);

/// Compares chunks and records with their checksums, in any order, on any thread.
pub(super) struct Comparison<'a> {
    reader: &'a Reader,
    /// The checksums of each extent's chunks, if only the whole record has one.
    parts: Vec<Mutex<Vec<(u64, PartChecksums)>>>,
}

impl Reader {
    /// Returns whether the file contains checksums to compare with.
    pub(crate) fn can_be_audited(&self) -> bool {
        self.has_sums() || self.coverage() == Coverage::Data
    }

    /// Compares the checksums of a copied extent with those of the file.
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

/// Description of a record's CRC-32 in errors.
const CRC32: &str = "CRC-32; torch.serialization.set_crc32_options(False) leaves wrong ones";

impl<'a> Comparison<'a> {
    /// Creates a comparison for a file that contains checksums.
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

    /// Compares one chunk, or notes its checksum if only the whole record has one. `step(from, out)` fills `out` with
    /// the chunk's bytes from `from` on. They are hashed while they are in the CPU cache.
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

    /// Compares records that have a single checksum.
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

/// The chunks to compare of arenas that are being read.
pub(super) struct Plan<'a> {
    reader: &'a Reader,
    arenas: &'a [(Arena, Region)],
    access: &'a GpuAccess,
    /// In order of arrival.
    cells: Vec<Cell>,
    comparison: Option<Comparison<'a>>,
    /// Limits the chunks that are optional.
    budget: Option<Budget>,
    bytes: u64,
}

#[derive(Clone, Copy)]
struct Cell {
    arena: usize,
    extent: usize,
    /// Start of the extent in the arena.
    at: u64,
    index: u64,
    /// Compared at any cost.
    is_due: bool,
}

impl<'a> Plan<'a> {
    /// Plans the verification of a load that began at `began`.
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
        let members = arenas
            .iter()
            .enumerate()
            .flat_map(|(index, (arena, _))| arena.members.iter().map(move |member| (index, member.extent, member.at)));
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

    /// Compares the planned chunks. Returns how many bytes were compared.
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
        let threads = work_queue::thread_count(self.cells.len());
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
        work_queue::for_each(threads, &self.cells, scratch, |scratch, cell| {
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
        work_queue::for_each(threads.min(put_off.len()), &put_off, scratch, |scratch, cell| {
            progress.check()?;
            if Instant::now() < deadline { compare(cell, scratch) } else { Ok(()) }
        })
    }

    /// Returns the range of a chunk in its arena.
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
