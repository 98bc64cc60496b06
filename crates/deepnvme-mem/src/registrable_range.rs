//! Memory to register.

use std::ops::Range;

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
    /// Returns the addresses of the bytes.
    #[must_use]
    pub fn addresses(&self) -> Range<usize> {
        self.raw.addr()..self.raw.addr() + self.raw.len()
    }

    /// Returns whether the kernel can pin it: contiguous host memory of at least a byte.
    #[must_use]
    pub fn is_pinnable(&self) -> bool {
        self.raw.device() == Device::Host && self.raw.is_contiguous() && self.raw.len() > 0
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
