//! Registered buffers: memory that the kernel has pinned and mapped once, instead of for every op.
//!
//! The kernel's table is sparse, and an entry covers up to 1 GiB. A longer region takes several. A refusal (old kernel,
//! `RLIMIT_MEMLOCK`, memory that cannot be pinned) is not an error: the ops then use plain addresses.
#![allow(unsafe_code)]

use deepnvme_mem::RegistrableRange;
use io_uring::Submitter;
use smallvec::SmallVec;

/// Entries of the table.
const BUFFERS_MAX: u16 = 256;
/// Maximum bytes of one kernel entry.
const BUFFER_BYTES_MAX: usize = 1 << 30;

/// The ring's table of pinned memory.
pub(super) struct BufferTable {
    registered: Vec<Registered>,
    /// The byte ranges of all of it by address, for the look-up of every op.
    ranges: Vec<PinnedRange>,
    free: Vec<u16>,
    enabled: bool,
    /// Maximum bytes of one entry.
    entry_bytes: usize,
}

struct Registered {
    /// Keeps the memory alive while the kernel has it pinned at this address.
    memory: RegistrableRange,
    uses: u32,
    entries: SmallVec<[u16; 4]>,
}

#[derive(Clone, Copy)]
struct PinnedRange {
    start: usize,
    end: usize,
    entry: u16,
}

impl BufferTable {
    /// Creates an empty table.
    pub(super) fn new(submitter: &Submitter<'_>) -> Self {
        let enabled = submitter.register_buffers_sparse(u32::from(BUFFERS_MAX)).is_ok();
        let free = if enabled { (0..BUFFERS_MAX).rev().collect() } else { Vec::new() };
        Self { registered: Vec::new(), ranges: Vec::new(), free, enabled, entry_bytes: BUFFER_BYTES_MAX }
    }

    /// Returns whether the kernel supports the table.
    pub(super) fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Returns the entry that covers all of this memory, if any.
    pub(super) fn find(&self, addr: usize, len: usize) -> Option<u16> {
        let after = self.ranges.partition_point(|range| range.start <= addr);
        let range = self.ranges[..after].last()?;
        (addr + len <= range.end).then_some(range.entry)
    }

    /// Pins memory. Returns false for memory on a GPU, memory that is empty or not contiguous, a table without enough
    /// free entries, a refusal by the kernel, and an overlap with other registered memory: each address has one
    /// entry.
    pub(super) fn register(&mut self, submitter: &Submitter<'_>, memory: &RegistrableRange) -> bool {
        if let Some(known) = self.position(memory) {
            self.registered[known].uses += 1;
            return true;
        }
        let addresses = memory.addresses();
        let parts = addresses.len().div_ceil(self.entry_bytes);
        if !memory.is_pinnable() || parts > self.free.len() || self.overlaps(memory) {
            return false;
        }
        let mut registered = Registered { memory: memory.clone(), uses: 1, entries: SmallVec::new() };
        for part in 0..parts {
            let start = addresses.start + part * self.entry_bytes;
            let end = (start + self.entry_bytes).min(addresses.end);
            let Some(entry) = self.free.pop() else { break };
            if !update(submitter, entry, start, end - start) {
                self.free.push(entry);
                self.release(submitter, &registered);
                return false;
            }
            registered.entries.push(entry);
            let place = self.ranges.partition_point(|range| range.start < start);
            self.ranges.insert(place, PinnedRange { start, end, entry });
        }
        self.registered.push(registered);
        true
    }

    /// Unpins memory once it has been unregistered as often as registered.
    pub(super) fn unregister(&mut self, submitter: &Submitter<'_>, memory: &RegistrableRange) {
        let Some(known) = self.position(memory) else {
            return;
        };
        self.registered[known].uses -= 1;
        if self.registered[known].uses == 0 {
            let registered = self.registered.swap_remove(known);
            self.release(submitter, &registered);
        }
    }

    /// Unpins everything.
    pub(super) fn clear(&mut self, submitter: &Submitter<'_>) {
        for registered in std::mem::take(&mut self.registered) {
            self.release(submitter, &registered);
        }
    }

    fn position(&self, memory: &RegistrableRange) -> Option<usize> {
        self.registered.iter().position(|known| known.memory.addresses() == memory.addresses())
    }

    fn overlaps(&self, memory: &RegistrableRange) -> bool {
        let addresses = memory.addresses();
        self.ranges.iter().any(|range| range.start < addresses.end && addresses.start < range.end)
    }

    fn release(&mut self, submitter: &Submitter<'_>, registered: &Registered) {
        for &entry in &registered.entries {
            // An entry that cannot be emptied is not used again. Closing the ring frees it.
            if update(submitter, entry, 0, 0) {
                self.free.push(entry);
            }
            self.ranges.retain(|range| range.entry != entry);
        }
    }
}

/// Fills one entry of the kernel's table, or empties it (address and length 0).
fn update(submitter: &Submitter<'_>, entry: u16, addr: usize, len: usize) -> bool {
    let iovec = libc::iovec { iov_base: addr as *mut libc::c_void, iov_len: len };
    // SAFETY: the memory is alive when the kernel pins it, and `Registered` keeps it alive at least until the table
    // asks to empty the entry. The kernel keeps the pages pinned for ops in flight, and as long as it refuses to empty
    // the entry, which no op uses any more.
    unsafe { submitter.register_buffers_update(u32::from(entry), &[iovec], None).is_ok() }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use deepnvme_mem::{Buffer, Device, Region};
    use io_uring::IoUring;

    use super::*;

    const ENTRY_BYTES: usize = 64 << 10;

    /// Creates a table whose entries cover 64 KiB, so that long regions are cheap. `None` without `io_uring`.
    fn small_table() -> Option<(IoUring, BufferTable)> {
        let ring = IoUring::new(4).inspect_err(|error| eprintln!("SKIPPED: {error}")).ok()?;
        let mut table = BufferTable::new(&ring.submitter());
        table.entry_bytes = ENTRY_BYTES;
        table.is_enabled().then_some((ring, table))
    }

    #[test]
    fn a_long_region_takes_several_entries() {
        let Some((ring, mut table)) = small_table() else { return };
        let region = Buffer::zeroed(3 * ENTRY_BYTES + 100).unwrap().into_region().region();
        let start = region.addr();
        assert!(table.register(&ring.submitter(), &RegistrableRange::from(&region)));
        let entries: Vec<_> = (0..4).map(|part| table.find(start + part * ENTRY_BYTES, 100)).collect();
        let mut distinct = entries.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert!(distinct.len() == 4 && !distinct.contains(&None), "{entries:?}");
        assert_eq!(table.find(start, ENTRY_BYTES), entries[0]);
        assert_eq!(table.find(start + ENTRY_BYTES - 1, 2), None, "an op across two entries names its memory itself");
        assert_eq!(table.find(start + region.len() - 1, 2), None);
        assert_eq!(table.find(start - 1, 1), None);
        table.unregister(&ring.submitter(), &RegistrableRange::from(&region));
        assert_eq!((table.find(start, 1), table.free.len()), (None, usize::from(BUFFERS_MAX)));
    }

    #[test]
    fn a_region_that_is_refused_halfway_leaves_nothing_behind() {
        let Some((ring, mut table)) = small_table() else { return };
        // SAFETY: a new mapping, which the test never unmaps.
        let start = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            libc::mmap(std::ptr::null_mut(), 2 * ENTRY_BYTES, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        assert_ne!(start, libc::MAP_FAILED);
        // SAFETY: the second half of that mapping, which nothing accesses.
        let result = unsafe { libc::mprotect(start.add(ENTRY_BYTES), ENTRY_BYTES, libc::PROT_NONE) };
        assert_eq!(result, 0);
        // SAFETY: the test never touches the bytes, and the kernel may not.
        let region = unsafe { Region::from_raw(start.cast(), 2 * ENTRY_BYTES, Device::Host, Arc::new(())) };
        assert!(!table.register(&ring.submitter(), &RegistrableRange::from(&region)));
        assert_eq!((table.find(start as usize, 1), table.free.len()), (None, usize::from(BUFFERS_MAX)));
        assert!(
            table.register(&ring.submitter(), &RegistrableRange::from(&region.slice(0..ENTRY_BYTES))),
            "the first half can be pinned"
        );
    }
}
