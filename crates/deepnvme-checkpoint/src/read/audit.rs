//! Reading a whole file to compare it with its sums, in little memory: what `deepnvme verify` does.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use deepnvme_format::sums::CELL_BYTES;
use deepnvme_io::Engine;
use deepnvme_io::mem::{Buffer, RegionMut};

use super::Reader;
use super::verify::Comparison;
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::write::threads;

/// What one thread reads at once: whole cells.
const WINDOW_BYTES: u64 = 32 << 20;

/// A stretch of an extent, or of several that lie together.
struct Window {
    offset: u64,
    bytes: u64,
    /// Extent, index of its cell, where the cell begins in the window, its bytes.
    cells: Vec<(usize, u64, u64, u64)>,
}

impl Reader {
    /// Compares every byte of every tensor with its sums, and returns how many bytes those were.
    ///
    /// # Errors
    /// `Damaged` with the first difference that was found; `NoSums` where there is nothing to compare with.
    pub fn audit(&mut self, engine: &Engine, progress: &Progress) -> Result<u64> {
        let all: Vec<usize> = (0..self.extents.len()).collect();
        self.resolve(engine, &all)?;
        let comparison = Comparison::new(self)?;
        let windows = self.windows(&all);
        progress.expect(windows.iter().map(|window| window.bytes).sum());
        let (next, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
        let failed: Mutex<Option<Error>> = Mutex::new(None);
        let work = || {
            while let Some(window) = windows.get(next.fetch_add(1, Ordering::Relaxed)) {
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
                if let Err(error) = progress.check().and_then(|()| self.compare(window, engine, &comparison)) {
                    is_over.store(true, Ordering::Relaxed);
                    failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner).get_or_insert(error);
                    return;
                }
                progress.advance(window.bytes);
            }
        };
        // One more than hashes at a time: somebody is always reading.
        std::thread::scope(|scope| {
            for _ in 0..threads(windows.len()) {
                scope.spawn(work);
            }
            work();
        });
        if let Some(error) = failed.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
            return Err(error);
        }
        comparison.finish()?;
        Ok(self.extents.iter().map(|extent| extent.bytes).sum())
    }

    fn windows(&self, all: &[usize]) -> Vec<Window> {
        let mut windows: Vec<Window> = Vec::new();
        for arena in self.arenas(all) {
            if arena.bytes <= WINDOW_BYTES {
                let cells = arena.members.iter().flat_map(|member| {
                    let bytes = self.extents[member.extent].bytes;
                    (0..bytes.div_ceil(CELL_BYTES)).map(move |index| {
                        let start = index * CELL_BYTES;
                        (member.extent, index, member.at + start, CELL_BYTES.min(bytes - start))
                    })
                });
                let cells = cells.collect();
                windows.push(Window { offset: arena.offset, bytes: arena.bytes, cells });
                continue;
            }
            for member in arena.members {
                let extent = &self.extents[member.extent];
                for from in (0..extent.bytes).step_by(WINDOW_BYTES as usize) {
                    let bytes = WINDOW_BYTES.min(extent.bytes - from);
                    let cells = (0..bytes.div_ceil(CELL_BYTES)).map(|index| {
                        let at = index * CELL_BYTES;
                        (member.extent, from / CELL_BYTES + index, at, CELL_BYTES.min(bytes - at))
                    });
                    let cells = cells.collect();
                    windows.push(Window { offset: extent.data_offset + from, bytes, cells });
                }
            }
        }
        windows
    }

    fn compare(&self, window: &Window, engine: &Engine, comparison: &Comparison<'_>) -> Result<()> {
        // As far from a page as the stretch is from a block: then most of it is read without a copy.
        let lead = window.offset % 4096;
        let buffer = Buffer::zeroed((lead + window.bytes) as usize).map_err(|error| {
            deepnvme_io::Error::new(deepnvme_io::ErrorKind::Io, "allocate a window", error.to_string())
        })?;
        let (_, target): (RegionMut, RegionMut) = buffer.into_region().split_at(lead as usize);
        let view = target.region();
        engine.read(&self.file, window.offset, target)?.wait().1?;
        let mut scratch = vec![0; CELL_BYTES as usize];
        for &(extent, index, at, bytes) in &window.cells {
            let scratch = &mut scratch[..bytes as usize];
            view.copy_to_slice(at as usize, scratch);
            comparison.compare(extent, index, scratch)?;
        }
        Ok(())
    }
}
