//! Device memory: an address range that traps, and a second mapping of the same bytes for the fake driver.
//!
//! The range stays reserved after it is freed, so no address is reused, and a stale pointer never reaches a newer
//! allocation. New memory contains a seeded pattern.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use crate::abi::{Device, INVALID_VALUE, OUT_OF_MEMORY, Outcome};
use crate::rng::splitmix64;

/// Both mappings of an allocation. Ops that use it hold it, so the bytes outlive a premature free.
#[derive(Debug)]
pub(crate) struct Mapping {
    device_address: usize,
    alias: usize,
    mapped_bytes: usize,
}

/// A live allocation.
#[derive(Clone, Debug)]
pub(crate) struct Allocation {
    pub(crate) bytes: usize,
    pub(crate) device: Device,
    /// Unique in the process, as `CU_POINTER_ATTRIBUTE_BUFFER_ID`.
    pub(crate) id: u64,
    pub(crate) mapping: Arc<Mapping>,
}

/// All live allocations, by first address.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    allocations: BTreeMap<u64, Allocation>,
    made: u64,
}

impl Memory {
    /// Allocates on a device with `free_bytes` free bytes.
    pub(crate) fn allocate(&mut self, device: Device, bytes: usize, free_bytes: u64, seed: u64) -> Outcome<u64> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        if bytes as u64 > free_bytes {
            return Err(OUT_OF_MEMORY);
        }
        let mapping = Mapping::new(bytes).ok_or(OUT_OF_MEMORY)?;
        self.made += 1;
        fill_pattern(mapping.alias, bytes, splitmix64(seed ^ self.made));
        let base = mapping.device_address as u64;
        let allocation = Allocation { bytes, device, id: self.made, mapping: Arc::new(mapping) };
        self.allocations.insert(base, allocation);
        Ok(base)
    }

    /// Returns the allocation at `base`.
    pub(crate) fn at(&self, base: u64) -> Option<&Allocation> {
        self.allocations.get(&base)
    }

    /// Removes an allocation. Its bytes are freed with the last op that uses them.
    pub(crate) fn remove(&mut self, base: u64) {
        self.allocations.remove(&base);
    }

    /// Returns the allocation that contains an address.
    pub(crate) fn allocation_containing(&self, address: u64) -> Option<&Allocation> {
        let (_, found) = self.allocations.range(..=address).next_back()?;
        (address - found.base() < found.bytes as u64).then_some(found)
    }

    /// Returns the allocation that contains the whole range.
    pub(crate) fn holding(&self, address: u64, bytes: u64) -> Outcome<&Allocation> {
        let found = self.allocation_containing(address).ok_or(INVALID_VALUE)?;
        let bytes_max = found.bytes as u64 - (address - found.base());
        if bytes <= bytes_max { Ok(found) } else { Err(INVALID_VALUE) }
    }

    /// Returns the allocations of a device, or of all devices.
    pub(crate) fn of(&self, device: Option<Device>) -> impl Iterator<Item = &Allocation> {
        self.allocations.values().filter(move |allocation| device.is_none_or(|device| allocation.device == device))
    }
}

impl Allocation {
    /// Returns its first device address.
    pub(crate) fn base(&self) -> u64 {
        self.mapping.device_address as u64
    }

    /// Returns the fake driver's address of a device address.
    pub(crate) fn alias_of(&self, address: u64) -> usize {
        self.mapping.alias + (address - self.base()) as usize
    }
}

impl Mapping {
    fn new(bytes: usize) -> Option<Self> {
        let mapped_bytes = bytes.checked_next_multiple_of(page_bytes())?;
        // SAFETY: a file without a name, its size set before it is mapped; both mappings are new ones, at addresses
        // that the kernel chooses, and are unmapped in `drop` only.
        unsafe {
            let fd = libc::memfd_create(c"fake_driver".as_ptr(), libc::MFD_CLOEXEC);
            if fd < 0 {
                return None;
            }
            let file = OwnedFd::from_raw_fd(fd);
            if libc::ftruncate(file.as_raw_fd(), libc::off_t::try_from(mapped_bytes).ok()?) != 0 {
                return None;
            }
            let map = |protection| {
                let at = std::ptr::null_mut();
                let mapped = libc::mmap(at, mapped_bytes, protection, libc::MAP_SHARED, file.as_raw_fd(), 0);
                (mapped != libc::MAP_FAILED).then(|| mapped.expose_provenance())
            };
            let alias = map(libc::PROT_READ | libc::PROT_WRITE)?;
            let Some(device_address) = map(libc::PROT_NONE) else {
                libc::munmap(std::ptr::with_exposed_provenance_mut(alias), mapped_bytes);
                return None;
            };
            Some(Self { device_address, alias, mapped_bytes })
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let reserve = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: both ranges are this mapping's own and nothing uses the alias any more, since users hold the
        // mapping. The device's range is replaced by one that traps, not given back, so that it is never reused.
        unsafe {
            libc::munmap(std::ptr::with_exposed_provenance_mut(self.alias), self.mapped_bytes);
            let at = std::ptr::with_exposed_provenance_mut(self.device_address);
            libc::mmap(at, self.mapped_bytes, libc::PROT_NONE, reserve, -1, 0);
        }
    }
}

/// Writes [`crate::pattern`] to memory that the fake driver can write.
pub(crate) fn fill_pattern(address: usize, bytes: usize, seed: u64) {
    let start: *mut u8 = std::ptr::with_exposed_provenance_mut(address);
    for (index, at) in (0..bytes).step_by(8).enumerate() {
        let word = splitmix64(seed.wrapping_add(index as u64)).to_le_bytes();
        // SAFETY: `bytes` bytes from `address` are mapped for as long as the caller holds their owner, and the last
        // word is cut to what is left of them.
        unsafe { std::ptr::copy_nonoverlapping(word.as_ptr(), start.add(at), word.len().min(bytes - at)) };
    }
}

/// Returns the page size.
pub(crate) fn page_bytes() -> usize {
    // SAFETY: returns a constant of the C library.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocations_end_at_their_last_byte_and_are_never_given_out_again() {
        let mut memory = Memory::default();
        let base = memory.allocate(1, 5000, 1 << 20, 7).unwrap();
        assert!(memory.holding(base, 5000).is_ok() && memory.holding(base + 4999, 1).is_ok());
        assert_eq!(memory.holding(base, 5001).unwrap_err(), INVALID_VALUE);
        assert_eq!(memory.holding(base + 4999, 2).unwrap_err(), INVALID_VALUE);
        assert_eq!(memory.allocate(1, 5000, 4999, 7), Err(OUT_OF_MEMORY));
        memory.remove(base);
        assert!(memory.allocation_containing(base).is_none());
        let next = memory.allocate(0, 5000, 1 << 20, 7).unwrap();
        assert!(next != base && memory.of(Some(1)).count() == 0 && memory.of(None).count() == 1);
    }
}
