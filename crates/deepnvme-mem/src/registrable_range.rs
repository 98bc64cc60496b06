//! Memory to register.

use crate::device::Device;
use crate::raw_memory::RawMemory;
use crate::region::Region;
use crate::region_mut::RegionMut;

/// The addresses of memory that the kernel or a device registers.
///
/// A range keeps its memory alive, and gives no access to the bytes. So it may exist while other code holds references
/// to them.
#[derive(Clone, Debug)]
pub struct RegistrableRange {
    pub(crate) raw: RawMemory,
}

impl RegistrableRange {
    /// Returns the address of the first byte.
    #[must_use]
    pub fn addr(&self) -> usize {
        self.raw.addr()
    }

    /// Returns the number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.raw.len()
    }

    /// Returns whether the range is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the device of the memory.
    #[must_use]
    pub fn device(&self) -> Device {
        self.raw.device()
    }

    /// Returns whether the bytes are contiguous.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        self.raw.is_contiguous()
    }
}

impl From<&Region> for RegistrableRange {
    fn from(region: &Region) -> Self {
        Self { raw: region.raw.clone() }
    }
}

impl From<&RegionMut> for RegistrableRange {
    fn from(region: &RegionMut) -> Self {
        Self::from(&region.region())
    }
}
