//! Reading a whole file to compare it with its sums, in little memory: what `deepnvme verify` does.

use deepnvme_format::sums::CELL_BYTES;
use deepnvme_io::Engine;

use super::Reader;
use super::verify::Comparison;
use crate::crew;
use crate::error::Result;
use crate::progress::Progress;
use crate::stretch;

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
        self.audit_these(&all, engine, progress)?;
        Ok(self.extents.iter().map(|extent| extent.bytes).sum())
    }

    /// The same of some extents, whose headers have been read.
    pub(crate) fn audit_these(&self, wanted: &[usize], engine: &Engine, progress: &Progress) -> Result<()> {
        let comparison = Comparison::new(self)?;
        let windows = self.windows(wanted);
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
        comparison.finish()
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
        let view = stretch::read(engine, &self.file, &(window.offset..window.offset + window.bytes))?;
        for &(extent, index, at, bytes) in &window.cells {
            let scratch = &mut scratch[..bytes as usize];
            view.copy_to_slice(at as usize, scratch);
            comparison.compare(extent, index, scratch)?;
        }
        Ok(())
    }
}
