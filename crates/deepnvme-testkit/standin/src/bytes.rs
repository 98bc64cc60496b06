//! Where the bytes of a copy are, found when it is asked for, and moved when its turn comes.

use std::sync::Arc;

use crate::abi::{INVALID_VALUE, Outcome};
use crate::host::{Keep, Reach};
use crate::memory::fill_pattern;
use crate::span::{Shape, Use};
use crate::world::World;

/// One end of a copy, as the caller names it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Side {
    /// Device memory.
    Device(u64),
    /// Host memory.
    Host(usize),
    /// Whatever the address says, as with unified addresses.
    Either(u64),
}

/// Bytes that stay mapped for as long as this lives (the caller's own memory: for as long as the caller lets it).
pub(crate) struct Stretch {
    address: usize,
    shape: Shape,
    _keep: Option<Keep>,
}

/// What [`World::locate`] found out.
pub(crate) struct Located {
    pub(crate) stretch: Stretch,
    pub(crate) used: Use,
    pub(crate) pageable: bool,
}

impl World {
    /// Finds the bytes of one end of a copy, all of them inside one allocation.
    pub(crate) fn locate(&self, side: Side, shape: Shape, writes: bool) -> Outcome<Located> {
        let extent = shape.extent().ok_or(INVALID_VALUE)?;
        let (start, address, keep, pageable) = match side {
            Side::Device(start) => {
                let found = self.memory.holding(start, extent)?;
                (start, found.alias_of(start), Some(Arc::clone(&found.mapping) as Keep), false)
            }
            // A device's address is no host's, and copying there would end the process.
            Side::Host(start) if self.memory.around(start as u64).is_some() => return Err(INVALID_VALUE),
            Side::Host(start) => match self.host.reach(start, extent)? {
                Reach::Pinned(keep) => (start as u64, start, keep, false),
                Reach::Pageable => (start as u64, start, None, true),
            },
            Side::Either(start) if self.memory.around(start).is_some() => {
                return self.locate(Side::Device(start), shape, writes);
            }
            Side::Either(start) => return self.locate(Side::Host(start as usize), shape, writes),
        };
        let stretch = Stretch { address, shape, _keep: keep };
        Ok(Located { stretch, used: Use { start, shape, writes }, pageable })
    }
}

impl Stretch {
    fn row(&self, row: u64) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.address + (row * self.shape.pitch) as usize)
    }

    fn rows(&self) -> impl Iterator<Item = *mut u8> {
        (0..self.shape.height).map(|row| self.row(row))
    }

    /// Copies all rows to those of another stretch of as many and as wide ones.
    pub(crate) fn copy_to(&self, to: &Self) {
        debug_assert_eq!((self.shape.width, self.shape.height), (to.shape.width, to.shape.height));
        for (from, to) in self.rows().zip(to.rows()) {
            // SAFETY: both ends were checked against what is allocated, and the keepers hold what the stand-in
            // mapped. That the caller's own memory is still there is the caller's duty, as with a real device.
            unsafe { std::ptr::copy(from, to, self.shape.width as usize) };
        }
    }

    /// Sets all bytes to `byte`.
    pub(crate) fn fill(&self, byte: u8) {
        for row in self.rows() {
            // SAFETY: as in `copy_to`.
            unsafe { row.write_bytes(byte, self.shape.width as usize) };
        }
    }

    /// Writes the known pattern to the first row.
    pub(crate) fn fill_pattern(&self, seed: u64) {
        fill_pattern(self.address, self.shape.width as usize, seed);
    }

    /// The bytes of the first row from `from` on, for system calls.
    pub(crate) fn part(&self, from: usize) -> *mut u8 {
        self.row(0).wrapping_add(from)
    }
}
