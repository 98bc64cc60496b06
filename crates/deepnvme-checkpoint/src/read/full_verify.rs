//! The full verify of a file, in little memory. `deepnvme verify` uses it.

use deepnvme_file::aligned_range::read_range;
use deepnvme_format::checksums::CHUNK_BYTES;
use deepnvme_io::Engine;
use deepnvme_io::mem::Region;

use super::Reader;
use super::verify::{Comparison, SAMPLE, scratch};
use crate::error::Result;
use crate::progress::Progress;
use crate::work_queue;

/// Bytes per read of a thread: whole chunks.
const RUN_BYTES: u64 = if cfg!(simulated) { 16 << 10 } else { 32 << 20 };

/// A byte range of one extent, or of several adjacent extents.
struct ChunkRun {
    offset: u64,
    bytes: u64,
    /// Extent, chunk index, start of the chunk in the run, size of the chunk.
    chunks: Vec<(usize, u64, u64, u64)>,
}

impl Reader {
    /// Compares every byte that the file's checksums cover. Returns the size of all tensors, or of the storages of an
    /// archive. [`coverage`](Self::coverage) tells whether names, types and shapes are covered as well.
    ///
    /// # Errors
    /// `Damaged` with the first difference found, `NoChecksums` if there are no checksums, `Format` for a damaged
    /// header or sidecar, `Interrupted`, or `Io`.
    pub fn verify_all(&mut self, engine: &Engine, progress: &Progress) -> Result<u64> {
        self.check_metadata()?;
        let all: Vec<usize> = (0..self.records.len()).collect();
        self.resolve(engine, &all)?;
        self.verify_extents(&all, engine, progress)?;
        Ok(self.extents().iter().map(|extent| extent.bytes).sum())
    }

    /// Compares what no load of the tensors reads: the other records of an archive, and the headers of all records. Does
    /// nothing to a file whose index is damaged or without checksums.
    ///
    /// # Errors
    /// As [`verify_all`](Self::verify_all). A header that the checksums cover is reported by
    /// [`check_metadata`](Self::check_metadata).
    pub fn verify_others(&mut self, engine: &Engine) -> Result<()> {
        if self.extent_count == self.records.len() || !self.is_verifiable() || self.check_metadata().is_err() {
            return Ok(());
        }
        let all: Vec<usize> = (0..self.records.len()).collect();
        self.resolve(engine, &all)?;
        if self.check_metadata().is_err() {
            return Ok(());
        }
        self.verify_extents(&all[self.extent_count..], engine, &Progress::default())
    }

    /// Compares the index and the tensors with their checksums: all chunks, or a random sample of one in 32 (at least
    /// one). A sample of a file without checksums compares nothing. The records of an archive must be
    /// [resolved](Self::resolve).
    ///
    /// # Errors
    /// As [`verify_all`](Self::verify_all).
    pub fn verify_tensors(&self, engine: &Engine, is_sample: bool, progress: &Progress) -> Result<()> {
        self.check_metadata()?;
        let all: Vec<usize> = (0..self.extent_count).collect();
        if !is_sample {
            return self.verify_extents(&all, engine, progress);
        }
        if !self.has_checksums() {
            return Ok(());
        }
        let chunks = all.into_iter().flat_map(|extent| {
            let count = self.records[extent].bytes.div_ceil(CHUNK_BYTES);
            (0..count).map(move |index| (extent, index))
        });
        let mut chunks: Vec<(usize, u64)> = chunks.collect();
        fastrand::shuffle(&mut chunks);
        chunks.truncate(chunks.len().div_ceil(SAMPLE));
        let run = |(extent, index): (usize, u64)| {
            let (start, record) = (index * CHUNK_BYTES, &self.records[extent]);
            let bytes = CHUNK_BYTES.min(record.bytes - start);
            ChunkRun { offset: record.data_offset + start, bytes, chunks: vec![(extent, index, 0, bytes)] }
        };
        let runs: Vec<ChunkRun> = chunks.into_iter().map(run).collect();
        self.verify_runs(&runs, engine, progress)
    }

    /// Compares bytes of an extent with the checksums, after the range from `start` was read into `memory`. Whole
    /// chunks are compared in memory. Chunks that the range cuts are read again. Without checksums nothing is compared.
    ///
    /// # Errors
    /// As [`verify_all`](Self::verify_all).
    pub fn verify_range(&self, engine: &Engine, extent: usize, start: u64, memory: &Region) -> Result<()> {
        self.check_metadata()?;
        if !self.has_checksums() || memory.is_empty() {
            return Ok(());
        }
        let (record, end) = (&self.records[extent], start + memory.len() as u64);
        let comparison = Comparison::new(self)?;
        let (mut scratch, mut cut) = (scratch(), Vec::new());
        for index in start / CHUNK_BYTES..end.div_ceil(CHUNK_BYTES) {
            let from = index * CHUNK_BYTES;
            let bytes = CHUNK_BYTES.min(record.bytes - from);
            if from < start || from + bytes > end {
                let chunks = vec![(extent, index, 0, bytes)];
                cut.push(ChunkRun { offset: record.data_offset + from, bytes, chunks });
                continue;
            }
            comparison.compare(extent, index, bytes, &mut scratch, |at, step| {
                memory.copy_to_slice((from - start + at) as usize, step);
                Ok(())
            })?;
        }
        self.verify_runs(&cut, engine, &Progress::default())
    }

    /// Like [`verify_all`](Self::verify_all), for some extents whose headers have been read.
    pub(crate) fn verify_extents(&self, wanted: &[usize], engine: &Engine, progress: &Progress) -> Result<()> {
        self.verify_runs(&self.runs(wanted), engine, progress)
    }

    fn verify_runs(&self, runs: &[ChunkRun], engine: &Engine, progress: &Progress) -> Result<()> {
        let comparison = Comparison::new(self)?;
        progress.expect(runs.iter().map(|run| run.bytes).sum());
        // One thread more than can hash at a time, so that one is always reading.
        work_queue::for_each(work_queue::thread_count(runs.len()) + 1, runs, scratch, |scratch, run| {
            progress.check()?;
            self.compare(run, engine, &comparison, scratch)?;
            progress.advance(run.bytes);
            Ok(())
        })?;
        comparison.finish()
    }

    fn runs(&self, all: &[usize]) -> Vec<ChunkRun> {
        let mut runs: Vec<ChunkRun> = Vec::new();
        for buffer in self.load_buffers(all) {
            if buffer.bytes <= RUN_BYTES {
                let chunks = buffer.members.iter().flat_map(|member| {
                    let bytes = self.records[member.extent].bytes;
                    (0..bytes.div_ceil(CHUNK_BYTES)).map(move |index| {
                        let start = index * CHUNK_BYTES;
                        (member.extent, index, member.at + start, CHUNK_BYTES.min(bytes - start))
                    })
                });
                let chunks = chunks.collect();
                runs.push(ChunkRun { offset: buffer.offset, bytes: buffer.bytes, chunks });
                continue;
            }
            for member in buffer.members {
                let extent = &self.records[member.extent];
                for from in (0..extent.bytes).step_by(RUN_BYTES as usize) {
                    let bytes = RUN_BYTES.min(extent.bytes - from);
                    let chunks = (0..bytes.div_ceil(CHUNK_BYTES)).map(|index| {
                        let at = index * CHUNK_BYTES;
                        (member.extent, from / CHUNK_BYTES + index, at, CHUNK_BYTES.min(bytes - at))
                    });
                    let chunks = chunks.collect();
                    runs.push(ChunkRun { offset: extent.data_offset + from, bytes, chunks });
                }
            }
        }
        runs
    }

    fn compare(&self, run: &ChunkRun, engine: &Engine, comparison: &Comparison<'_>, scratch: &mut [u8]) -> Result<()> {
        let view = read_range(engine, &self.file, &(run.offset..run.offset + run.bytes))?;
        for &(extent, index, at, bytes) in &run.chunks {
            comparison.compare(extent, index, bytes, scratch, |from, step| {
                view.copy_to_slice((at + from) as usize, step);
                Ok(())
            })?;
        }
        Ok(())
    }
}
