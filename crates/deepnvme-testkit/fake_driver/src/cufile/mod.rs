//! The exported functions of `libcufile.so.0`, and the state behind them.
//!
//! | module | contents |
//! | --- | --- |
//! | `abi` | codes and structs of the header, and the entry checks of these functions |
//! | `session` | opening and closing the driver, its parameters and properties |
//! | `statistics` | counted transfers |
//! | `registered` | files and buffers that are registered |
//! | `transfer` | one transfer: checked when requested, then moved in pieces |
//! | `direct` | synchronous calls |
//! | `batch` | batches, whose entries complete late and in any order |
//! | `queued` | transfers that are ops of a stream |
//!
//! Stricter than the library: the driver must be open, a context of the memory's device must be current, and host
//! memory must be registered with the driver.

mod abi;
mod batch;
mod direct;
mod queued;
mod registered;
mod session;
mod statistics;
mod transfer;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::abi::Handle;
use crate::access::Access;

/// The state of cuFile.
pub(crate) struct CuFile {
    /// How often the driver was opened and not closed.
    pub(crate) opened: u32,
    pub(crate) handles: BTreeMap<Handle, Arc<registered::File>>,
    /// Registered buffers: bytes, by their first address.
    pub(crate) buffers: BTreeMap<u64, usize>,
    pub(crate) batches: BTreeMap<Handle, batch::Batch>,
    /// Whether the machine has no direct path: every file is copied through the host.
    compat: bool,
    /// Whether the next opening allows compatibility mode, if that was set.
    pending_compat: Option<bool>,
    statistics: statistics::Statistics,
    properties: abi::DriverProperties,
}

impl CuFile {
    /// Creates the state of a closed driver.
    pub(crate) fn new(compat: bool) -> Self {
        let properties = abi::DriverProperties::new(compat);
        Self {
            opened: 0,
            handles: BTreeMap::new(),
            buffers: BTreeMap::new(),
            batches: BTreeMap::new(),
            compat,
            pending_compat: None,
            statistics: statistics::Statistics::default(),
            properties,
        }
    }

    /// Returns whether a file may be copied through the host.
    fn allows_compat(&self) -> bool {
        self.properties.control_flags & abi::ALLOW_COMPAT_MODE != 0
    }

    /// Returns whether a registered buffer has bytes of a range.
    pub(crate) fn buffers_in(&self, start: u64, bytes: usize) -> bool {
        let range = Access::line(start, bytes, false);
        self.buffers.iter().any(|(start, bytes)| range.overlaps(&Access::line(*start, *bytes, false)))
    }
}
