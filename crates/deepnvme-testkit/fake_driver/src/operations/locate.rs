//! Finds the bytes of a copy, in memory of a device or of the host.

use std::sync::Arc;

use crate::abi::{INVALID_VALUE, Outcome};
use crate::access::{Access, Shape};
use crate::state::DriverState;
use crate::state::host::{HostAccess, Owner};
use crate::state::mapped_range::MappedRange;

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
        let (start, address, owner, pageable) = match side {
            Side::Device(start) => {
                let found = self.memory.holding(start, extent)?;
                (start, found.alias_of(start), Some(Arc::clone(&found.mapping) as Owner), false)
            }
            // A device address is not accessible to the host: copying there would crash.
            Side::Host(start) if self.memory.allocation_containing(start as u64).is_some() => {
                return Err(INVALID_VALUE);
            }
            Side::Host(start) => match self.host.access_of(start, extent)? {
                HostAccess::Pinned(owner) => (start as u64, start, owner, false),
                HostAccess::Pageable => (start as u64, start, None, true),
            },
            Side::Either(start) if self.memory.allocation_containing(start).is_some() => {
                return self.locate(Side::Device(start), shape, writes);
            }
            Side::Either(start) => return self.locate(Side::Host(start as usize), shape, writes),
        };
        let range = MappedRange::new(address, shape, owner);
        Ok(Located { range, used: Access { start, shape, writes }, pageable })
    }
}
