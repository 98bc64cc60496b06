//! The locations of a copy's bytes, resolved when it is queued and accessed when it runs.

use std::sync::Arc;

use crate::abi::{INVALID_VALUE, Outcome};
use crate::access::{Access, Shape};
use crate::host::{HostAccess, Keep};
use crate::memory::fill_pattern;
use crate::state::DriverState;

/// One side of a copy, as passed by the caller.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Side {
    /// Device memory.
    Device(u64),
    /// Host memory.
    Host(usize),
    /// Decided by the address, as with unified addressing.
    Either(u64),
}

/// Bytes that stay mapped while this lives (the caller's own memory: as long as the caller keeps it).
pub(crate) struct MappedRange {
    address: usize,
    shape: Shape,
    _keep: Option<Keep>,
}

/// The result of [`DriverState::locate`].
pub(crate) struct Located {
    pub(crate) range: MappedRange,
    pub(crate) used: Access,
    pub(crate) pageable: bool,
}

impl DriverState {
    /// Resolves one side of a copy inside one allocation.
    pub(crate) fn locate(&self, side: Side, shape: Shape, writes: bool) -> Outcome<Located> {
        let extent = shape.extent().ok_or(INVALID_VALUE)?;
        let (start, address, keep, pageable) = match side {
            Side::Device(start) => {
                let found = self.memory.holding(start, extent)?;
                (start, found.alias_of(start), Some(Arc::clone(&found.mapping) as Keep), false)
            }
            // A device address is not accessible to the host: copying there would crash.
            Side::Host(start) if self.memory.around(start as u64).is_some() => return Err(INVALID_VALUE),
            Side::Host(start) => match self.host.reach(start, extent)? {
                HostAccess::Pinned(keep) => (start as u64, start, keep, false),
                HostAccess::Pageable => (start as u64, start, None, true),
            },
            Side::Either(start) if self.memory.around(start).is_some() => {
                return self.locate(Side::Device(start), shape, writes);
            }
            Side::Either(start) => return self.locate(Side::Host(start as usize), shape, writes),
        };
        let range = MappedRange { address, shape, _keep: keep };
        Ok(Located { range, used: Access { start, shape, writes }, pageable })
    }
}

impl MappedRange {
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
            // SAFETY: both sides were checked against the allocations, and the keepers hold the mappings. The caller
            // keeps its own memory, as with a real device.
            unsafe { std::ptr::copy(from, to, self.shape.width as usize) };
        }
    }

    /// Fills all bytes.
    pub(crate) fn fill(&self, byte: u8) {
        for row in self.rows() {
            // SAFETY: the range was checked against the allocations, and its keeper holds the mapping. The caller of
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
