//! The comparison of loaded data with its checksums on several cores, while the rest is still being read.

use std::ops::Range;
use std::sync::atomic::Ordering;

use deepnvme_format::checksums::{CHUNK_BYTES, Hasher, PartChecksums, RecordChecksums};
use deepnvme_io::GpuAccess;
use deepnvme_io::mem::Region;
use deepnvme_io::mem::sync::ignore_poison;

use super::time_budget::TimeBudget;
use super::{Coverage, LoadBuffer, Reader};
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::sync::{AtomicU64, Instant, Mutex, lock};
use crate::work_queue;
use crate::write::STEP_BYTES;

/// A sample compares one chunk in this many.
pub(super) const SAMPLE: usize = 32;
/// Description of a record's CRC-32 in errors.
const CRC32: &str = "CRC-32; torch.serialization.set_crc32_options(False) leaves wrong ones";

/// How much of the loaded data to compare with checksums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// Nothing.
    Off,
    /// One chunk in 32, chosen at random, and at least one. Nothing without a sidecar; CRC-32s count only for
    /// `Full`.
    Sample,
    /// At least a sample, and as much as 3 % of the load's time allows: everything if the CPUs hash that fast. Nothing
    /// without a sidecar, as for `Sample`.
    #[default]
    Auto,
    /// Everything. A file without checksums is refused. Torch archives have a CRC-32 for each record.
    Full,
}

/// The bytes of a load that were compared with checksums, and those that were not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Compared {
    /// Bytes compared.
    pub(super) compared: u64,
    /// Bytes skipped.
    pub(super) skipped: u64,
}

/// Allocates the buffer of one hashing thread.
pub(super) fn scratch() -> Vec<u8> {
    vec![0; STEP_BYTES as usize]
}

/// Waits for a range of a buffer: buffer, start, end.
type WaitForRange<'a> = &'a (dyn Fn(usize, u64, u64) -> Result<()> + Sync);

/// Compares chunks and records with their checksums, in any order, on any thread.
pub(super) struct Comparison<'a> {
    reader: &'a Reader,
    /// For files that have only a CRC-32 per record: the checksums of each extent's chunks, to be combined in `finish`.
    partial_checksums: Vec<Mutex<Vec<(u64, PartChecksums)>>>,
}

impl<'a> Comparison<'a> {
    /// Creates a comparison for a file that contains checksums.
    pub(super) fn new(reader: &'a Reader) -> Result<Self> {
        reader.check_metadata()?;
        if !reader.is_verifiable() {
            let is_stale = reader.coverage() == Coverage::Stale;
            return Err(Error::NoChecksums { path: reader.path().to_path_buf(), is_stale });
        }
        let partial_checksums = match reader.has_checksums() {
            true => Vec::new(),
            false => reader.records.iter().map(|_| Mutex::default()).collect(),
        };
        Ok(Self { reader, partial_checksums })
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
        let saved = self.reader.checksums(extent).map(|chunks| chunks[index as usize]);
        let mut hasher = if saved.is_some() { Hasher::of_chunks() } else { Hasher::of_records() };
        let mut at = 0;
        while at < bytes {
            let now = &mut scratch[..STEP_BYTES.min(bytes - at) as usize];
            step(at, now)?;
            hasher.update(now);
            at += now.len() as u64;
        }
        let checksums = hasher.finish();
        match saved {
            Some(saved) if saved == checksums.crc64 => Ok(()),
            Some(_) => Err(self.reader.mismatch(&self.reader.records[extent], start, bytes, "CRC-64")),
            None => {
                lock(&self.partial_checksums[extent]).push((start, checksums));
                Ok(())
            }
        }
    }

    /// Compares records that have a single checksum.
    pub(super) fn finish(&self) -> Result<()> {
        for (extent, partial_checksums) in self.reader.records.iter().zip(&self.partial_checksums) {
            let mut parts = std::mem::take(&mut *lock(partial_checksums));
            if parts.is_empty() {
                continue;
            }
            // A record in several buffers was hashed once in each.
            parts.sort_unstable_by_key(|(start, part)| (*start, part.bytes, part.crc32, part.crc64));
            parts.dedup();
            if parts.windows(2).any(|pair| pair[0].0 == pair[1].0) {
                return Err(self.reader.mismatch(extent, 0, extent.bytes, CRC32));
            }
            let checksums =
                RecordChecksums::from_parts(parts).map_err(|error| Error::format(self.reader.path(), error))?;
            if Some(checksums.crc32) != extent.crc32 {
                return Err(self.reader.mismatch(extent, 0, extent.bytes, CRC32));
            }
        }
        Ok(())
    }
}

/// The chunks to compare of buffers that are being read.
pub(super) struct VerifyPlan<'a> {
    reader: &'a Reader,
    buffers: &'a [(LoadBuffer, Region)],
    access: &'a GpuAccess,
    /// In order of arrival.
    chunks: Vec<Chunk>,
    comparison: Option<Comparison<'a>>,
    /// Limits the chunks that are optional.
    budget: Option<TimeBudget>,
    bytes: u64,
}

#[derive(Clone, Copy)]
struct Chunk {
    buffer: usize,
    extent: usize,
    /// Start of the extent in the buffer.
    at: u64,
    index: u64,
    /// Compared at any cost.
    is_required: bool,
}

impl<'a> VerifyPlan<'a> {
    /// Plans the verification of a load that began at `began`.
    pub(super) fn new(
        reader: &'a Reader,
        buffers: &'a [(LoadBuffer, Region)],
        access: &'a GpuAccess,
        verify: Verify,
        began: Instant,
    ) -> Result<Self> {
        let comparison = match verify {
            Verify::Full => Some(Comparison::new(reader)?),
            Verify::Sample | Verify::Auto if reader.has_checksums() => Some(Comparison::new(reader)?),
            Verify::Sample | Verify::Auto | Verify::Off => None,
        };
        let members = buffers.iter().enumerate().flat_map(|(index, (buffer, _))| {
            buffer.members.iter().map(move |member| (index, member.extent, member.at))
        });
        let bytes = members.clone().map(|(_, extent, _)| reader.records[extent].bytes).sum();
        let mut chunks = Vec::new();
        if comparison.is_some() {
            for (buffer, extent, at) in members {
                let count = reader.records[extent].bytes.div_ceil(CHUNK_BYTES);
                chunks.extend((0..count).map(|index| Chunk { buffer, extent, at, index, is_required: true }));
            }
        }
        if verify != Verify::Full && !chunks.is_empty() {
            let count = chunks.len().div_ceil(SAMPLE);
            fastrand::shuffle(&mut chunks);
            match verify {
                Verify::Auto => chunks[count..].iter_mut().for_each(|chunk| chunk.is_required = false),
                _ => chunks.truncate(count),
            }
            chunks.sort_unstable_by_key(|chunk| (chunk.buffer, chunk.at, chunk.index));
        }
        let budget = (verify == Verify::Auto).then(|| TimeBudget::new(began));
        Ok(Self { reader, buffers, access, chunks, comparison, budget, bytes })
    }

    /// Compares the planned chunks. Returns how many bytes were compared, and how many were not.
    pub(super) fn run(&self, wait: WaitForRange<'_>, progress: &Progress) -> Result<Compared> {
        let compared = AtomicU64::new(0);
        if let Some(comparison) = &self.comparison {
            self.run_chunks(comparison, wait, progress, &compared)?;
            comparison.finish()?;
        }
        let compared = compared.into_inner();
        Ok(Compared { compared, skipped: self.bytes - compared })
    }

    fn run_chunks(
        &self,
        comparison: &Comparison<'_>,
        wait: WaitForRange<'_>,
        progress: &Progress,
        compared: &AtomicU64,
    ) -> Result<()> {
        let threads = work_queue::thread_count(self.chunks.len());
        let compare = |chunk: &Chunk, scratch: &mut [u8]| {
            let mut work = || self.compare(*chunk, comparison, scratch);
            let bytes = match &self.budget {
                Some(budget) => budget.spend(&mut work)?,
                None => work()?,
            };
            compared.fetch_add(bytes, Ordering::Relaxed);
            Ok(())
        };
        let deferred = Mutex::new(Vec::new());
        work_queue::for_each(threads, &self.chunks, scratch, |scratch, chunk| {
            progress.check()?;
            let range = self.range(*chunk);
            wait(chunk.buffer, range.start, range.end)?;
            if chunk.is_required || self.budget.as_ref().is_none_or(TimeBudget::is_left) {
                return compare(chunk, scratch);
            }
            lock(&deferred).push(*chunk);
            Ok(())
        })?;
        let deferred = ignore_poison(deferred.into_inner());
        let Some(deadline) = self.budget.as_ref().filter(|_| !deferred.is_empty()).map(TimeBudget::deadline) else {
            return Ok(());
        };
        work_queue::for_each(threads.min(deferred.len()), &deferred, scratch, |scratch, chunk| {
            progress.check()?;
            if Instant::now() < deadline { compare(chunk, scratch) } else { Ok(()) }
        })
    }

    /// Returns the range of a chunk in its buffer.
    fn range(&self, chunk: Chunk) -> Range<u64> {
        let start = chunk.index * CHUNK_BYTES;
        let bytes = CHUNK_BYTES.min(self.reader.records[chunk.extent].bytes - start);
        chunk.at + start..chunk.at + start + bytes
    }

    fn compare(&self, chunk: Chunk, comparison: &Comparison<'_>, scratch: &mut [u8]) -> Result<u64> {
        let range = self.range(chunk);
        let (memory, bytes) = (&self.buffers[chunk.buffer].1, range.end - range.start);
        comparison.compare(chunk.extent, chunk.index, bytes, scratch, |at, step| {
            Ok(self.access.copy_to_slice(memory, (range.start + at) as usize, step)?)
        })?;
        Ok(bytes)
    }
}

impl Reader {
    /// Returns whether the file contains checksums to compare with.
    pub(crate) fn is_verifiable(&self) -> bool {
        self.has_checksums() || self.coverage() == Coverage::Data
    }

    /// Compares the checksums of a copied extent with those of the file.
    pub(crate) fn compare_checksums(&self, index: usize, copy: &RecordChecksums) -> Result<()> {
        let extent = &self.extents()[index];
        let Some(chunks) = self.checksums(index) else {
            let is_same = extent.crc32.is_none_or(|crc32| crc32 == copy.crc32);
            return if is_same { Ok(()) } else { Err(self.mismatch(extent, 0, extent.bytes, CRC32)) };
        };
        let different = chunks.iter().zip(&copy.chunks).position(|(saved, copied)| saved != copied);
        different.map_or(Ok(()), |chunk| {
            let start = chunk as u64 * CHUNK_BYTES;
            Err(self.mismatch(extent, start, CHUNK_BYTES.min(extent.bytes - start), "CRC-64"))
        })
    }
}
