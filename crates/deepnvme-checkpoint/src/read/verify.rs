//! Comparing what has come with what was saved, on all processors, while the rest is on its way.

use std::sync::{Mutex, PoisonError};

use deepnvme_format::sums::{CELL_BYTES, PartSums, RecordSums, sums_of};
use deepnvme_io::GpuAccess;
use deepnvme_io::mem::Region;

use super::{Arena, Reader};
use crate::crew;
use crate::error::{Error, Result};
use crate::progress::Progress;

/// How much of what is loaded is compared with its sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// Nothing.
    Off,
    /// One cell in [`SAMPLE`], chosen at random, and one at least. Without sums nothing.
    #[default]
    Sample,
    /// Everything. A file without sums is refused; archives of torch have a CRC-32 for each record.
    Full,
}

/// Of so many cells one is compared in a sample.
const SAMPLE: usize = 32;

/// Waits until that part of an arena has come: arena, begin, end.
type Wait<'a> = &'a (dyn Fn(usize, u64, u64) -> Result<()> + Sync);

/// Cells and records compared with their sums, in any order, by any thread.
pub(super) struct Comparison<'a> {
    reader: &'a Reader,
    /// By extent, the sums of its cells, where the whole record has one only.
    parts: Vec<Mutex<Vec<(u64, PartSums)>>>,
}

impl Reader {
    /// Whether there is something to compare with.
    pub(crate) fn can_be_audited(&self) -> bool {
        self.has_sums() || self.extents().iter().all(|extent| extent.crc32.is_some())
    }

    /// Compares the sums of a copy of an extent with what the file says.
    pub(crate) fn compare_sums(&self, index: usize, copy: &RecordSums) -> Result<()> {
        let extent = &self.extents()[index];
        let Some(cells) = self.sums(index) else {
            let is_same = extent.crc32.is_none_or(|crc32| crc32 == copy.crc32);
            return if is_same { Ok(()) } else { Err(self.mismatch(extent, 0, extent.bytes, CRC32)) };
        };
        let different = cells.iter().zip(&copy.cells).position(|(saved, copied)| saved != copied);
        different.map_or(Ok(()), |cell| {
            let start = cell as u64 * CELL_BYTES;
            Err(self.mismatch(extent, start, CELL_BYTES.min(extent.bytes - start), "CRC-64"))
        })
    }
}

/// What is said of a record's one sum.
const CRC32: &str = "CRC-32; torch.serialization.set_crc32_options(False) leaves wrong ones";

impl<'a> Comparison<'a> {
    /// Of a file that has something to compare with.
    pub(super) fn new(reader: &'a Reader) -> Result<Self> {
        if !reader.can_be_audited() {
            return Err(Error::NoSums { path: reader.path().to_path_buf() });
        }
        let wants_parts = !reader.has_sums();
        let parts = if wants_parts { reader.extents().iter().map(|_| Mutex::default()).collect() } else { Vec::new() };
        Ok(Self { reader, parts })
    }

    /// Compares a cell, or notes its sum where only the whole record has one.
    pub(super) fn compare(&self, extent: usize, index: u64, bytes: &[u8]) -> Result<()> {
        let (sums, start) = (sums_of(bytes), index * CELL_BYTES);
        match self.reader.sums(extent) {
            Some(cells) if cells[index as usize] == sums.crc64 => Ok(()),
            Some(_) => {
                let extent = &self.reader.extents()[extent];
                Err(self.reader.mismatch(extent, start, bytes.len() as u64, "CRC-64"))
            }
            None => {
                self.parts[extent].lock().unwrap_or_else(PoisonError::into_inner).push((start, sums));
                Ok(())
            }
        }
    }

    /// Compares records that have one sum for all.
    pub(super) fn finish(&self) -> Result<()> {
        for (extent, parts) in self.reader.extents().iter().zip(&self.parts) {
            let parts = std::mem::take(&mut *parts.lock().unwrap_or_else(PoisonError::into_inner));
            if parts.is_empty() {
                continue;
            }
            let sums = RecordSums::from_parts(parts).map_err(|error| Error::format(self.reader.path(), error))?;
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
    cells: Vec<Cell>,
    comparison: Option<Comparison<'a>>,
}

#[derive(Clone, Copy)]
struct Cell {
    arena: usize,
    extent: usize,
    /// Where in the arena the extent begins.
    at: u64,
    index: u64,
}

impl<'a> Plan<'a> {
    pub(super) fn new(
        reader: &'a Reader,
        arenas: &'a [(Arena, Region)],
        access: &'a GpuAccess,
        verify: Verify,
    ) -> Result<Self> {
        let comparison = match verify {
            Verify::Full => Some(Comparison::new(reader)?),
            Verify::Sample if reader.has_sums() => Some(Comparison::new(reader)?),
            Verify::Sample | Verify::Off => None,
        };
        let mut cells = Vec::new();
        if comparison.is_some() {
            for (arena, (stretch, _)) in arenas.iter().enumerate() {
                for member in &stretch.members {
                    let count = reader.extents()[member.extent].bytes.div_ceil(CELL_BYTES);
                    let all = (0..count).map(|index| Cell { arena, extent: member.extent, at: member.at, index });
                    cells.extend(all);
                }
            }
        }
        if verify == Verify::Sample && !cells.is_empty() {
            let count = cells.len().div_ceil(SAMPLE);
            fastrand::shuffle(&mut cells);
            cells.truncate(count);
            // In the order in which they come.
            cells.sort_unstable_by_key(|cell| (cell.arena, cell.at, cell.index));
        }
        Ok(Self { reader, arenas, access, cells, comparison })
    }

    /// Compares all of it.
    pub(super) fn run(&self, wait: Wait<'_>, progress: &Progress) -> Result<()> {
        let Some(comparison) = &self.comparison else { return Ok(()) };
        crew::each(crew::threads(self.cells.len()), &self.cells, Vec::new, |scratch, cell| {
            progress.check()?;
            self.compare(*cell, comparison, wait, scratch)
        })?;
        comparison.finish()
    }

    fn compare(&self, cell: Cell, comparison: &Comparison<'_>, wait: Wait<'_>, scratch: &mut Vec<u8>) -> Result<()> {
        let start = cell.index * CELL_BYTES;
        let bytes = CELL_BYTES.min(self.reader.extents()[cell.extent].bytes - start);
        wait(cell.arena, cell.at + start, cell.at + start + bytes)?;
        scratch.resize(bytes as usize, 0);
        self.access.copy_to_slice(&self.arenas[cell.arena].1, (cell.at + start) as usize, scratch)?;
        comparison.compare(cell.extent, cell.index, scratch)
    }
}
