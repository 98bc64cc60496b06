//! Reads of byte ranges into aligned buffers. Each byte has the same offset within a page of memory as within a page
//! of the file, so that direct I/O needs no copy.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use deepnvme_io::mem::{Buffer, PAGE_BYTES, Region, RegionMut};
use deepnvme_io::{Engine, Error, Refused, Result, TensorFile, Transfer, Transferred};

/// A byte range of a file. It is read from the start of its first page, into the start of a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AlignedRange {
    start: u64,
    bytes: usize,
}

impl AlignedRange {
    /// Returns the range of `bytes` bytes from `start` on.
    #[must_use]
    pub const fn new(start: u64, bytes: usize) -> Self {
        Self { start, bytes }
    }

    /// Returns the offset in the file of the page where the range begins.
    #[must_use]
    pub fn page_start(self) -> u64 {
        self.start - self.start % PAGE_BYTES
    }

    /// Returns the range within the buffer.
    #[must_use]
    pub fn in_buffer(self) -> Range<usize> {
        let lead = (self.start % PAGE_BYTES) as usize;
        lead..lead + self.bytes
    }

    /// Bytes of the pages that contain the range.
    #[must_use]
    pub fn page_span_bytes(self) -> usize {
        self.in_buffer().end.next_multiple_of(PAGE_BYTES as usize)
    }

    /// Splits a buffer into the memory to read into, and the rest. [`join_buffer`] is the inverse.
    ///
    /// # Panics
    /// If the buffer is too short.
    #[must_use]
    pub fn split(self, buffer: Buffer) -> (RegionMut, RegionMut) {
        buffer.into_region().split_at(self.in_buffer().end)
    }
}

/// Joins the parts of a buffer that [`AlignedRange::split`] made. `None` if an error lost a part, or another region of
/// the memory is alive.
#[must_use]
pub fn join_buffer(memory: Option<RegionMut>, rest: RegionMut) -> Option<Buffer> {
    memory.and_then(|memory| memory.join(rest).ok()).and_then(|whole| whole.into_buffer().ok())
}

/// A read of an [`AlignedRange`] in flight.
#[derive(Debug)]
pub struct AlignedRead {
    pending: Transfer<RegionMut>,
    rest: RegionMut,
}

impl AlignedRead {
    /// Starts to read the range into the buffer.
    ///
    /// # Errors
    /// As [`Engine::try_read`], with the buffer unless the error lost it.
    ///
    /// # Panics
    /// If the buffer is too short.
    pub fn start(
        engine: &Engine,
        file: &Arc<TensorFile>,
        range: AlignedRange,
        buffer: Buffer,
    ) -> Result<Self, (Error, Option<Buffer>)> {
        let (target, rest) = range.split(buffer);
        match engine.try_read(file, range.page_start(), target) {
            Ok(pending) => Ok(Self { pending, rest }),
            Err(Refused { error, memory }) => Err((error, join_buffer(memory, rest))),
        }
    }

    /// Returns whether the read is done.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.pending.is_done()
    }

    /// Waits for the read, up to `timeout`. Returns whether it is done.
    #[must_use]
    pub fn wait_timeout(&self, timeout: Duration) -> bool {
        self.pending.wait_timeout(timeout)
    }

    /// Waits for the read. Returns the buffer, unless an error lost it, and the result.
    pub fn wait(self) -> (Option<Buffer>, Result<Transferred>) {
        let (memory, result) = self.pending.wait();
        (join_buffer(memory, self.rest), result)
    }
}

/// Reads a byte range into new memory, and waits for it.
///
/// # Errors
/// As [`Engine::read`], the error of the read itself, and `Io` if there is no memory.
pub fn read_range(engine: &Engine, file: &Arc<TensorFile>, range: &Range<u64>) -> Result<Region> {
    let Range { start, end } = AlignedRange::new(range.start, (range.end - range.start) as usize).in_buffer();
    let buffer = Buffer::zeroed(end);
    let buffer = buffer.map_err(|error| Error::from_io("allocate memory to read into", &error).at_path(file.path()))?;
    let (_, target) = buffer.into_region().split_at(start);
    let view = target.region();
    engine.read(file, range.start, target)?.wait().1?;
    Ok(view)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_has_the_same_offset_in_its_page_of_memory_as_of_the_file() {
        for (start, bytes) in [(0, 1), (1, 4096), (4095, 1), (4095, 2), (4096, 0), (3 * 4096 + 7, 10_000)] {
            let range = AlignedRange::new(start, bytes);
            assert_eq!(range.page_start() + range.in_buffer().start as u64, start);
            assert_eq!(range.in_buffer().len(), bytes);
            assert_eq!(range.page_start() % PAGE_BYTES, 0);
            assert!((range.in_buffer().end..range.in_buffer().end + 4096).contains(&range.page_span_bytes()));
        }
    }

    #[test]
    fn a_split_buffer_joins_again() {
        let (target, rest) = AlignedRange::new(5000, 100).split(Buffer::zeroed(8192).unwrap());
        assert_eq!((target.len(), rest.len()), (1004, 7188));
        assert_eq!(join_buffer(Some(target), rest).map(|buffer| buffer.len()), Some(8192));
    }
}
