//! Full verify: reading a whole file to compare it with its checksums, in little memory. `deepnvme verify` uses it.

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
const WINDOW_BYTES: u64 = if cfg!(simulated) { 16 << 10 } else { 32 << 20 };

/// A byte range of one extent, or of several adjacent extents.
struct Window {
    offset: u64,
    bytes: u64,
    /// Extent, chunk index, start of the chunk in the window, size of the chunk.
    cells: Vec<(usize, u64, u64, u64)>,
}

impl Reader {
    /// Compares every byte that the file's checksums cover. Returns the size of all tensors.
    /// [`coverage`](Self::coverage) tells whether names, types and shapes are covered as well.
    ///
    /// # Errors
    /// `Damaged` with the first difference found, or `NoSums` if there are no checksums.
    pub fn audit(&mut self, engine: &Engine, progress: &Progress) -> Result<u64> {
        self.check()?;
        let all: Vec<usize> = (0..self.records.len()).collect();
        self.resolve(engine, &all)?;
        self.audit_these(&all, engine, progress)?;
        Ok(self.extents().iter().map(|extent| extent.bytes).sum())
    }

    /// Compares the index and the tensors with their checksums: all chunks, or a random sample of one in 32 (at least
    /// one). A sample of a file without checksums compares nothing. The records of an archive must be
    /// [resolved](Self::resolve).
    ///
    /// # Errors
    /// As [`audit`](Self::audit).
    pub fn audit_tensors(&self, engine: &Engine, is_sample: bool, progress: &Progress) -> Result<()> {
        self.check()?;
        let all: Vec<usize> = (0..self.extents).collect();
        if !is_sample {
            return self.audit_these(&all, engine, progress);
        }
        if !self.has_sums() {
            return Ok(());
        }
        let cells = all.into_iter().flat_map(|extent| {
            let count = self.records[extent].bytes.div_ceil(CHUNK_BYTES);
            (0..count).map(move |index| (extent, index))
        });
        let mut cells: Vec<(usize, u64)> = cells.collect();
        fastrand::shuffle(&mut cells);
        cells.truncate(cells.len().div_ceil(SAMPLE));
        let window = |(extent, index): (usize, u64)| {
            let (start, record) = (index * CHUNK_BYTES, &self.records[extent]);
            let bytes = CHUNK_BYTES.min(record.bytes - start);
            Window { offset: record.data_offset + start, bytes, cells: vec![(extent, index, 0, bytes)] }
        };
        let windows: Vec<Window> = cells.into_iter().map(window).collect();
        self.audit_windows(&windows, engine, progress)
    }

    /// Compares bytes of an extent with the checksums, after the range from `start` was read into `memory`. Whole
    /// chunks are compared in memory. Chunks that the range cuts are read again. Without checksums nothing is compared.
    ///
    /// # Errors
    /// As [`audit`](Self::audit).
    pub fn audit_range(&self, engine: &Engine, extent: usize, start: u64, memory: &Region) -> Result<()> {
        self.check()?;
        if !self.has_sums() || memory.is_empty() {
            return Ok(());
        }
        let (record, end) = (&self.records[extent], start + memory.len() as u64);
        let comparison = Comparison::new(self)?;
        let (mut scratch, mut cut) = (scratch(), Vec::new());
        for index in start / CHUNK_BYTES..end.div_ceil(CHUNK_BYTES) {
            let from = index * CHUNK_BYTES;
            let bytes = CHUNK_BYTES.min(record.bytes - from);
            if from < start || from + bytes > end {
                let cells = vec![(extent, index, 0, bytes)];
                cut.push(Window { offset: record.data_offset + from, bytes, cells });
                continue;
            }
            comparison.compare(extent, index, bytes, &mut scratch, |at, step| {
                memory.copy_to_slice((from - start + at) as usize, step);
                Ok(())
            })?;
        }
        self.audit_windows(&cut, engine, &Progress::default())
    }

    /// Like [`audit`](Self::audit), for some extents whose headers have been read.
    pub(crate) fn audit_these(&self, wanted: &[usize], engine: &Engine, progress: &Progress) -> Result<()> {
        self.audit_windows(&self.windows(wanted), engine, progress)
    }

    fn audit_windows(&self, windows: &[Window], engine: &Engine, progress: &Progress) -> Result<()> {
        let comparison = Comparison::new(self)?;
        progress.expect(windows.iter().map(|window| window.bytes).sum());
        // One thread more than can hash at a time, so that one is always reading.
        work_queue::for_each(work_queue::thread_count(windows.len()) + 1, windows, scratch, |scratch, window| {
            progress.check()?;
            self.compare(window, engine, &comparison, scratch)?;
            progress.advance(window.bytes);
            Ok(())
        })?;
        comparison.finish()
    }

    fn windows(&self, all: &[usize]) -> Vec<Window> {
        let mut windows: Vec<Window> = Vec::new();
        for arena in self.arenas(all) {
            if arena.bytes <= WINDOW_BYTES {
                let cells = arena.members.iter().flat_map(|member| {
                    let bytes = self.records[member.extent].bytes;
                    (0..bytes.div_ceil(CHUNK_BYTES)).map(move |index| {
                        let start = index * CHUNK_BYTES;
                        (member.extent, index, member.at + start, CHUNK_BYTES.min(bytes - start))
                    })
                });
                let cells = cells.collect();
                windows.push(Window { offset: arena.offset, bytes: arena.bytes, cells });
                continue;
            }
            for member in arena.members {
                let extent = &self.records[member.extent];
                for from in (0..extent.bytes).step_by(WINDOW_BYTES as usize) {
                    let bytes = WINDOW_BYTES.min(extent.bytes - from);
                    let cells = (0..bytes.div_ceil(CHUNK_BYTES)).map(|index| {
                        let at = index * CHUNK_BYTES;
                        (member.extent, from / CHUNK_BYTES + index, at, CHUNK_BYTES.min(bytes - at))
                    });
                    let cells = cells.collect();
                    windows.push(Window { offset: extent.data_offset + from, bytes, cells });
                }
            }
        }
        windows
    }

    fn compare(&self, window: &Window, engine: &Engine, comparison: &Comparison<'_>, scratch: &mut [u8]) -> Result<()> {
        let view = read_range(engine, &self.file, &(window.offset..window.offset + window.bytes))?;
        for &(extent, index, at, bytes) in &window.cells {
            comparison.compare(extent, index, bytes, scratch, |from, step| {
                view.copy_to_slice((at + from) as usize, step);
                Ok(())
            })?;
        }
        Ok(())
    }
}
