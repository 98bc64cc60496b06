//! Host memory that a device may reach: what was registered, and what was allocated page-locked.
//!
//! A registration takes whole pages, so two of them that share one clash, even where their bytes do not. Whether a
//! copy is asynchronous is decided by the bytes that were named.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::abi::{
    Device, HOST_MEMORY_ALREADY_REGISTERED, HOST_MEMORY_NOT_REGISTERED, INVALID_VALUE, OUT_OF_MEMORY, Outcome,
};
use crate::memory::{fill_pattern, page_bytes};

/// Whatever keeps memory mapped.
pub(crate) type Keep = Arc<dyn Any + Send + Sync>;

/// Memory of `cuMemHostAlloc`.
#[derive(Debug)]
struct Pages {
    address: usize,
    mapped_bytes: usize,
}

/// A range that a device may reach.
#[derive(Clone, Debug)]
pub(crate) struct HostRange {
    pub(crate) start: usize,
    pub(crate) bytes: usize,
    pub(crate) device: Device,
    /// The memory itself, where the stand-in allocated it.
    pages: Option<Arc<Pages>>,
}

/// What a host range is to a copy.
pub(crate) enum Reach {
    /// The device reads or writes it when the copy's turn comes. The keeper is there for allocated memory.
    Pinned(Option<Keep>),
    /// The copy has to be made before the call returns.
    Pageable,
}

/// All ranges, by their first address.
#[derive(Debug, Default)]
pub(crate) struct Host {
    ranges: BTreeMap<usize, HostRange>,
}

impl Host {
    /// Registers memory of the caller's.
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

    /// The registration that begins at `start`.
    pub(crate) fn registration(&self, start: usize) -> Outcome<&HostRange> {
        self.ranges.get(&start).filter(|range| range.is_registration()).ok_or(HOST_MEMORY_NOT_REGISTERED)
    }

    /// The page-locked allocation that begins at `start`.
    pub(crate) fn allocation(&self, start: usize) -> Outcome<&HostRange> {
        self.ranges.get(&start).filter(|range| !range.is_registration()).ok_or(INVALID_VALUE)
    }

    /// Allocates page-locked memory, with a pattern in it.
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

    /// Ends a registration or an allocation.
    pub(crate) fn remove(&mut self, start: usize) {
        self.ranges.remove(&start);
    }

    /// The range around an address.
    pub(crate) fn around(&self, address: usize) -> Option<&HostRange> {
        let (_, found) = self.ranges.range(..=address).next_back()?;
        (address - found.start < found.bytes).then_some(found)
    }

    /// What a range is to a copy. One that is reachable in parts is refused, as CUDA refuses it.
    pub(crate) fn reach(&self, start: usize, bytes: u64) -> Outcome<Reach> {
        let end = usize::try_from(bytes).ok().and_then(|bytes| start.checked_add(bytes)).ok_or(INVALID_VALUE)?;
        if start == 0 {
            return Err(INVALID_VALUE);
        }
        if let Some(range) = self.around(start) {
            let keep = range.pages.clone().map(|pages| pages as Keep);
            return if end <= range.start + range.bytes { Ok(Reach::Pinned(keep)) } else { Err(INVALID_VALUE) };
        }
        let next = self.ranges.range(start..).next();
        if next.is_some_and(|(first, _)| *first < end) { Err(INVALID_VALUE) } else { Ok(Reach::Pageable) }
    }

    /// All ranges.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = &HostRange> {
        self.ranges.values()
    }
}

impl HostRange {
    /// Whether the memory is the caller's own.
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
        // SAFETY: the mapping is this one's own; ops that still use it would hold it.
        unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(self.address), self.mapped_bytes) };
    }
}

fn pages_of(start: usize, bytes: usize) -> (usize, usize) {
    let page = page_bytes();
    (start / page * page, (start + bytes).next_multiple_of(page))
}

/// Whether there is memory at all of these addresses: a driver could not lock it otherwise.
fn is_mapped(start: usize, bytes: usize) -> bool {
    let (first, end) = pages_of(start, bytes);
    let mut resident = vec![0_u8; (end - first) / page_bytes()];
    // SAFETY: the kernel only looks at its own tables, and `resident` has a byte for each page.
    unsafe { libc::mincore(std::ptr::with_exposed_provenance_mut(first), end - first, resident.as_mut_ptr()) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_clash_by_page_and_reach_by_byte() {
        let memory = vec![0_u8; 8 * page_bytes()];
        let start = memory.as_ptr().addr().next_multiple_of(page_bytes()) + 100;
        let mut host = Host::default();
        host.register(start, 500, 0).unwrap();
        assert_eq!(host.register(start + 600, 10, 0), Err(HOST_MEMORY_ALREADY_REGISTERED));
        assert!(matches!(host.reach(start + 10, 490), Ok(Reach::Pinned(None))));
        assert!(matches!(host.reach(start + 500, 10), Ok(Reach::Pageable)));
        assert_eq!(host.reach(start + 10, 491).err(), Some(INVALID_VALUE));
        assert_eq!(host.reach(start - 10, 20).err(), Some(INVALID_VALUE));
        assert!(host.registration(start).is_ok() && host.registration(start + 1).is_err());
        assert_eq!(host.register(page_bytes(), 10, 0), Err(INVALID_VALUE), "nobody maps the second page");
    }
}
