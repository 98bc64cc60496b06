//! The memory of a request, which returns to its caller with the result.

use deepnvme_mem::{Device, Region, RegionMut};

/// The caller's memory, in the caller's order.
#[derive(Debug)]
pub(crate) enum RequestMemory {
    Targets(Vec<RegionMut>),
    Sources(Vec<Region>),
}

impl RequestMemory {
    pub(super) fn item_device(&self, item: u32) -> Device {
        match self {
            Self::Targets(targets) => targets[item as usize].device(),
            Self::Sources(sources) => sources[item as usize].device(),
        }
    }

    pub(super) fn item(&self, item: u32) -> Region {
        match self {
            Self::Targets(targets) => targets[item as usize].region(),
            Self::Sources(sources) => sources[item as usize].clone(),
        }
    }
}

/// Memory that returns to the caller with the result.
pub trait TransferMemory: Sized + sealed::Sealed {
    #[doc(hidden)]
    fn from_memory(memory: OpaqueMemory) -> Option<Self>;
}

/// The memory of a finished request. Opaque.
#[doc(hidden)]
#[derive(Debug)]
pub struct OpaqueMemory(RequestMemory);

impl OpaqueMemory {
    pub(crate) fn of(memory: RequestMemory) -> Self {
        Self(memory)
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for deepnvme_mem::RegionMut {}
    impl Sealed for deepnvme_mem::Region {}
    impl Sealed for Vec<deepnvme_mem::RegionMut> {}
    impl Sealed for Vec<deepnvme_mem::Region> {}
}

impl TransferMemory for Vec<RegionMut> {
    fn from_memory(memory: OpaqueMemory) -> Option<Self> {
        if let RequestMemory::Targets(targets) = memory.0 { Some(targets) } else { None }
    }
}

impl TransferMemory for Vec<Region> {
    fn from_memory(memory: OpaqueMemory) -> Option<Self> {
        if let RequestMemory::Sources(sources) = memory.0 { Some(sources) } else { None }
    }
}

impl TransferMemory for RegionMut {
    fn from_memory(memory: OpaqueMemory) -> Option<Self> {
        Vec::<Self>::from_memory(memory)?.pop()
    }
}

impl TransferMemory for Region {
    fn from_memory(memory: OpaqueMemory) -> Option<Self> {
        Vec::<Self>::from_memory(memory)?.pop()
    }
}
