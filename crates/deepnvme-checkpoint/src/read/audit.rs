//! Reading a whole file to compare it with its sums, in little memory: what `deepnvme verify` does.

use deepnvme_format::sums::CELL_BYTES;
use deepnvme_io::Engine;
use deepnvme_io::mem::{Buffer, RegionMut};

use super::Reader;
use super::verify::Comparison;
use crate::crew;
use crate::error::Result;
use crate::progress::Progress;

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
        // One more than hashes at a time: somebody is always reading.
        crew::each(
            crew::threads(windows.len()) + 1,
            &windows,
            || vec![0; CELL_BYTES as usize],
            |scratch, window| {
                progress.check()?;
                self.compare(window, engine, &comparison, scratch)?;
                progress.advance(window.bytes);
                Ok(())
            },
        )?;
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

    fn compare(&self, window: &Window, engine: &Engine, comparison: &Comparison<'_>, scratch: &mut [u8]) -> Result<()> {
        // As far from a page as the stretch is from a block: then most of it is read without a copy.
        let lead = window.offset % 4096;
        let buffer = Buffer::zeroed((lead + window.bytes) as usize);
        let buffer = buffer.map_err(|error| deepnvme_io::Error::from_io("allocate a window", &error))?;
        let (_, target): (RegionMut, RegionMut) = buffer.into_region().split_at(lead as usize);
        let view = target.region();
        engine.read(&self.file, window.offset, target)?.wait().1?;
        for &(extent, index, at, bytes) in &window.cells {
            let scratch = &mut scratch[..bytes as usize];
            view.copy_to_slice(at as usize, scratch);
            comparison.compare(extent, index, scratch)?;
        }
        Ok(())
    }
}
