//! The state of cuFile: registered files (`file`), batches of transfers (`batch`, `transfer`), and `statistics`.

pub(crate) mod batch;
pub(crate) mod file;
pub(crate) mod statistics;
pub(crate) mod transfer;

use std::collections::BTreeMap;
use std::sync::Arc;

use self::batch::Batch;
use self::file::File;
use self::statistics::Statistics;
use crate::abi::Handle;
use crate::abi::cufile::{ALLOW_COMPAT_MODE, DriverProperties};
use crate::access::Access;

/// The state of cuFile.
pub(crate) struct CuFile {
    /// How often the driver was opened and not closed.
    pub(crate) use_count: u32,
    pub(crate) handles: BTreeMap<Handle, Arc<File>>,
    /// Registered buffers: bytes, by their first address.
    pub(crate) buffers: BTreeMap<u64, usize>,
    pub(crate) batches: BTreeMap<Handle, Batch>,
    /// Whether the machine has no direct path: every file is copied through the host.
    pub(crate) compat: bool,
    /// Whether the next opening allows compatibility mode, if that was set.
    pub(crate) pending_compat: Option<bool>,
    pub(crate) statistics: Statistics,
    pub(crate) properties: DriverProperties,
}

impl CuFile {
    /// Creates the state of a closed driver.
    pub(crate) fn new(compat: bool) -> Self {
        let properties = DriverProperties::new(compat);
        Self {
            use_count: 0,
            handles: BTreeMap::new(),
            buffers: BTreeMap::new(),
            batches: BTreeMap::new(),
            compat,
            pending_compat: None,
            statistics: Statistics::default(),
            properties,
        }
    }

    /// Returns whether a file may be copied through the host.
    pub(crate) fn allows_compat(&self) -> bool {
        self.properties.control_flags & ALLOW_COMPAT_MODE != 0
    }

    /// Returns whether a registered buffer has bytes of a range.
    pub(crate) fn buffers_in(&self, start: u64, bytes: usize) -> bool {
        let range = Access::line(start, bytes, false);
        self.buffers.iter().any(|(start, bytes)| range.overlaps(&Access::line(*start, *bytes, false)))
    }
}
