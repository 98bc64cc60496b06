//! Comparing what has come with what was saved, on all processors, while the rest is on its way.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use deepnvme_format::sums::{CELL_BYTES, PartSums, RecordSums, sums_of};
use deepnvme_io::mem::Region;

use super::{Arena, Reader};
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::write::threads;

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

/// What is to be compared.
pub(super) struct Plan<'a> {
    reader: &'a Reader,
    arenas: &'a [(Arena, Region)],
    cells: Vec<Cell>,
    /// By extent, the sums of its cells, where the whole record has one only.
    parts: Vec<Mutex<Vec<(u64, PartSums)>>>,
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
    pub(super) fn new(reader: &'a Reader, arenas: &'a [(Arena, Region)], verify: Verify) -> Result<Self> {
        let mut cells = Vec::new();
        let has_crc32 = reader.extents().iter().all(|extent| extent.crc32.is_some());
        if verify == Verify::Full && !reader.has_sums() && !has_crc32 {
            return Err(Error::NoSums { path: reader.path().to_path_buf() });
        }
        if verify == Verify::Full || (verify == Verify::Sample && reader.has_sums()) {
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
        let wants_parts = !cells.is_empty() && !reader.has_sums();
        let parts = if wants_parts { reader.extents().iter().map(|_| Mutex::default()).collect() } else { Vec::new() };
        Ok(Self { reader, arenas, cells, parts })
    }

    /// Compares all of it.
    pub(super) fn run(&self, wait: Wait<'_>, progress: &Progress) -> Result<()> {
        let (next, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
        let failed: Mutex<Option<Error>> = Mutex::new(None);
        let work = || {
            let mut scratch = Vec::new();
            while let Some(cell) = self.cells.get(next.fetch_add(1, Ordering::Relaxed)) {
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
                if let Err(error) = progress.check().and_then(|()| self.compare(*cell, wait, &mut scratch)) {
                    is_over.store(true, Ordering::Relaxed);
                    failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads(self.cells.len()) {
                scope.spawn(work);
            }
            work();
        });
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => self.compare_records(),
        }
    }

    fn compare(&self, cell: Cell, wait: Wait<'_>, scratch: &mut Vec<u8>) -> Result<()> {
        let extent = &self.reader.extents()[cell.extent];
        let start = cell.index * CELL_BYTES;
        let bytes = CELL_BYTES.min(extent.bytes - start);
        wait(cell.arena, cell.at + start, cell.at + start + bytes)?;
        scratch.resize(bytes as usize, 0);
        self.arenas[cell.arena].1.copy_to_slice((cell.at + start) as usize, scratch);
        let sums = sums_of(scratch);
        match self.reader.sums(cell.extent) {
            Some(cells) if cells[cell.index as usize] != sums.crc64 => {
                Err(self.reader.mismatch(extent, start, bytes, "CRC-64"))
            }
            Some(_) => Ok(()),
            None => {
                let parts = &self.parts[cell.extent];
                parts.lock().unwrap_or_else(PoisonError::into_inner).push((start, sums));
                Ok(())
            }
        }
    }

    /// Of records with one sum for all.
    fn compare_records(&self) -> Result<()> {
        for (extent, parts) in self.reader.extents().iter().zip(&self.parts) {
            let parts = std::mem::take(&mut *parts.lock().unwrap_or_else(PoisonError::into_inner));
            if parts.is_empty() {
                continue;
            }
            let sums = RecordSums::from_parts(parts).map_err(|error| Error::format(self.reader.path(), error))?;
            if Some(sums.crc32) != extent.crc32 {
                let which = "CRC-32; torch.serialization.set_crc32_options(False) leaves wrong ones";
                return Err(self.reader.mismatch(extent, 0, extent.bytes, which));
            }
        }
        Ok(())
    }
}
