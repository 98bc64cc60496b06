//! Host memory that a device can access: registered, and pinned allocations.
//!
//! A registration covers whole pages, so two that share a page collide even if their bytes do not. Whether a copy is
//! asynchronous depends on the bytes passed.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::memory::{fill_pattern, page_bytes};
use crate::abi::{
    Device, HOST_MEMORY_ALREADY_REGISTERED, HOST_MEMORY_NOT_REGISTERED, INVALID_VALUE, OUT_OF_MEMORY, Outcome,
};

/// Keeps memory mapped.
pub(crate) type Owner = Arc<dyn Any + Send + Sync>;

/// Memory of `cuMemHostAlloc`.
#[derive(Debug)]
struct Pages {
    address: usize,
    mapped_bytes: usize,
}

/// A range that a device can access.
#[derive(Clone, Debug)]
pub(crate) struct HostRange {
    pub(crate) start: usize,
    pub(crate) bytes: usize,
    pub(crate) device: Device,
    /// The memory, if the fake driver allocated it.
    pages: Option<Arc<Pages>>,
}

/// How a copy accesses a host range.
pub(crate) enum HostAccess {
    /// The device accesses it when the copy runs. Allocated memory has an owner.
    Pinned(Option<Owner>),
    /// The copy is complete when the call returns.
    Pageable,
}

/// All ranges, by first address.
#[derive(Debug, Default)]
pub(crate) struct Host {
    ranges: BTreeMap<usize, HostRange>,
}

impl Host {
    /// Registers memory of the caller.
    pub(crate) fn register(&mut self, start: usize, bytes: usize, device: Device) -> Outcome {
        if start == 0 || bytes == 0 || start.checked_add(bytes).is_none() || !is_mapped(start, bytes) {
            return Err(INVALID_VALUE);
        }
        let (first, end) = pages_of(start, bytes);
        let clashes = |range: &HostRange| {
            let (other_first, other_end) = pages_of(range.start, range.bytes);
            first < other_end && other_first < end
        };
        if self.ranges.values().any(clashes) {
            return Err(HOST_MEMORY_ALREADY_REGISTERED);
        }
        self.ranges.insert(start, HostRange { start, bytes, device, pages: None });
        Ok(())
    }

    /// Returns the registration at `start`.
    pub(crate) fn registration(&self, start: usize) -> Outcome<&HostRange> {
        self.ranges.get(&start).filter(|range| range.is_registration()).ok_or(HOST_MEMORY_NOT_REGISTERED)
    }

    /// Returns the pinned allocation at `start`.
    pub(crate) fn allocation(&self, start: usize) -> Outcome<&HostRange> {
        self.ranges.get(&start).filter(|range| !range.is_registration()).ok_or(INVALID_VALUE)
    }

    /// Allocates pinned memory with a pattern.
    pub(crate) fn allocate(&mut self, bytes: usize, device: Device, seed: u64) -> Outcome<usize> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let pages = Pages::new(bytes).ok_or(OUT_OF_MEMORY)?;
        let start = pages.address;
        fill_pattern(start, bytes, seed);
        self.ranges.insert(start, HostRange { start, bytes, device, pages: Some(Arc::new(pages)) });
        Ok(start)
    }

    /// Removes a registration or an allocation.
    pub(crate) fn remove(&mut self, start: usize) {
        self.ranges.remove(&start);
    }

    /// Returns the range that contains an address.
    pub(crate) fn range_containing(&self, address: usize) -> Option<&HostRange> {
        let (_, found) = self.ranges.range(..=address).next_back()?;
        (address - found.start < found.bytes).then_some(found)
    }

    /// Returns how a copy accesses a range. Partly accessible ranges are refused, as in CUDA.
    pub(crate) fn access_of(&self, start: usize, bytes: u64) -> Outcome<HostAccess> {
        let end = usize::try_from(bytes).ok().and_then(|bytes| start.checked_add(bytes)).ok_or(INVALID_VALUE)?;
        if start == 0 {
            return Err(INVALID_VALUE);
        }
        if let Some(range) = self.range_containing(start) {
            let owner = range.pages.clone().map(|pages| pages as Owner);
            return if end <= range.start + range.bytes { Ok(HostAccess::Pinned(owner)) } else { Err(INVALID_VALUE) };
        }
        let next = self.ranges.range(start..).next();
        if next.is_some_and(|(first, _)| *first < end) { Err(INVALID_VALUE) } else { Ok(HostAccess::Pageable) }
    }

    /// Returns all ranges.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = &HostRange> {
        self.ranges.values()
    }
}

impl HostRange {
    /// Returns whether the memory belongs to the caller.
    pub(crate) fn is_registration(&self) -> bool {
        self.pages.is_none()
    }
}

impl Pages {
    fn new(bytes: usize) -> Option<Self> {
        let mapped_bytes = bytes.checked_next_multiple_of(page_bytes())?;
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let mapped = unsafe { libc::mmap(std::ptr::null_mut(), mapped_bytes, protection, flags, -1, 0) };
        (mapped != libc::MAP_FAILED).then(|| Self { address: mapped.expose_provenance(), mapped_bytes })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this value; ops that use it hold it.
        unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(self.address), self.mapped_bytes) };
    }
}

fn pages_of(start: usize, bytes: usize) -> (usize, usize) {
    let page = page_bytes();
    (start / page * page, (start + bytes).next_multiple_of(page))
}

/// Returns whether all of the addresses are mapped; otherwise a driver could not lock them.
fn is_mapped(start: usize, bytes: usize) -> bool {
    let (first, end) = pages_of(start, bytes);
    let mut resident = vec![0_u8; (end - first) / page_bytes()];
    // SAFETY: the kernel only reads its own tables, and `resident` has a byte for each page.
    unsafe { libc::mincore(std::ptr::with_exposed_provenance_mut(first), end - first, resident.as_mut_ptr()) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_clash_by_page_and_are_accessible_by_byte() {
        let memory = vec![0_u8; 8 * page_bytes()];
        let start = memory.as_ptr().addr().next_multiple_of(page_bytes()) + 100;
        let mut host = Host::default();
        host.register(start, 500, 0).unwrap();
        assert_eq!(host.register(start + 600, 10, 0), Err(HOST_MEMORY_ALREADY_REGISTERED));
        assert!(matches!(host.access_of(start + 10, 490), Ok(HostAccess::Pinned(None))));
        assert!(matches!(host.access_of(start + 500, 10), Ok(HostAccess::Pageable)));
        assert_eq!(host.access_of(start + 10, 491).err(), Some(INVALID_VALUE));
        assert_eq!(host.access_of(start - 10, 20).err(), Some(INVALID_VALUE));
        assert!(host.registration(start).is_ok() && host.registration(start + 1).is_err());
        assert_eq!(host.register(page_bytes(), 10, 0), Err(INVALID_VALUE), "nobody maps the second page");
    }
}
