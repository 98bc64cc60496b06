//! The bytes of an op, resolved when it is queued and accessed when it runs.

use super::host::Owner;
use super::memory::fill_pattern;
use crate::access::Shape;

/// Bytes that stay mapped while this lives (the caller's own memory: as long as the caller keeps it).
pub(crate) struct MappedRange {
    address: usize,
    shape: Shape,
    _owner: Option<Owner>,
}

impl MappedRange {
    /// Creates a range whose bytes are mapped at `address` for as long as `owner` lives. Without it, they belong to the
    /// caller of the driver.
    pub(crate) fn new(address: usize, shape: Shape, owner: Option<Owner>) -> Self {
        Self { address, shape, _owner: owner }
    }

    fn row(&self, row: u64) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.address + (row * self.shape.pitch) as usize)
    }

    fn rows(&self) -> impl Iterator<Item = *mut u8> {
        (0..self.shape.height).map(|row| self.row(row))
    }

    /// Copies all rows to a range of the same shape.
    pub(crate) fn copy_to(&self, to: &Self) {
        debug_assert_eq!((self.shape.width, self.shape.height), (to.shape.width, to.shape.height));
        for (from, to) in self.rows().zip(to.rows()) {
            // SAFETY: both sides were checked against the allocations, and the owners hold the mappings. The caller
            // keeps its own memory, as with a real device.
            unsafe { std::ptr::copy(from, to, self.shape.width as usize) };
        }
    }

    /// Fills all bytes.
    pub(crate) fn fill(&self, byte: u8) {
        for row in self.rows() {
            // SAFETY: the range was checked against the allocations, and its owner holds the mapping. The caller of
            // the driver keeps its own host memory, as with a real device.
            unsafe { row.write_bytes(byte, self.shape.width as usize) };
        }
    }

    /// Writes the known pattern to the first row.
    pub(crate) fn fill_pattern(&self, seed: u64) {
        fill_pattern(self.address, self.shape.width as usize, seed);
    }

    /// Returns a pointer into the first row, for system calls.
    pub(crate) fn part(&self, from: usize) -> *mut u8 {
        self.row(0).wrapping_add(from)
    }
}
