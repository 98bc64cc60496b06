//! Anonymous memory mappings.

use std::io;
use std::ops::Range;
use std::ptr::{self, NonNull};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::Alignment;

/// Pages that one system call asks about. Their flags fit into the second-level cache.
const PAGES_ASKED_MAX: usize = 64 << 10;

/// Whole pages of zeroed, private memory. Never empty.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    mapped_bytes: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread, and this value is its only owner.
unsafe impl Send for Mapping {}
// SAFETY: shared access returns the address and passes advice to the kernel, which any thread may do.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps at least `len` bytes. From 2 MiB on, they start on a huge-page boundary.
    ///
    /// # Errors
    /// `ENOMEM` if the kernel has no such range, or `len` exceeds any address space.
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        assert!(len > 0, "a mapping has at least one byte");
        let mapped_bytes = whole_pages(len)?;
        let huge = Alignment::HUGE.bytes() as usize;
        let made = if len < huge {
            Self::map(mapped_bytes, MapFlags::PRIVATE)
        } else {
            Self::map_aligned(mapped_bytes, huge, MapFlags::PRIVATE)
        };
        made.inspect(Self::count_mapped_bytes)
    }

    #[cfg(simulated)]
    fn count_mapped_bytes(&self) {
        crate::mapped_bytes::add(self.mapped_bytes);
    }

    #[cfg(not(simulated))]
    fn count_mapped_bytes(&self) {}

    /// Maps at least `len` bytes without reserving memory for them (`MAP_NORESERVE`). They start on a boundary of
    /// `page_bytes`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(crate) fn reserve(len: usize, page_bytes: usize) -> io::Result<Self> {
        assert!(len > 0, "a mapping has at least one byte");
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let mapped_bytes = whole_pages(len)?;
        let made = if page_bytes <= rustix::param::page_size() {
            Self::map(mapped_bytes, flags)
        } else {
            Self::map_aligned(mapped_bytes, page_bytes, flags)
        };
        made.inspect(Self::count_mapped_bytes)
    }

    /// Requests huge or small pages. Returns whether the kernel accepted.
    pub(crate) fn advise_pages(&self, are_huge: bool) -> bool {
        let advice = if are_huge { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
        // SAFETY: the range is this mapping, and the advice changes no byte of it.
        unsafe { madvise(self.start.as_ptr().cast(), self.mapped_bytes, advice) }.is_ok()
    }

    /// Frees the whole pages inside a range. They then read as zeros. Does nothing if the range ends beyond the
    /// mapping.
    pub(crate) fn discard(&self, range: Range<usize>) {
        let page_bytes = rustix::param::page_size();
        let (from, to) = (range.start.next_multiple_of(page_bytes), range.end / page_bytes * page_bytes);
        if from >= to || to > self.mapped_bytes {
            return;
        }
        // SAFETY: the pages are inside this private anonymous mapping. Only `ReservedRange` calls this, and never creates a
        // reference to its bytes. Readers find zeros.
        let discarded = unsafe { madvise(self.start.as_ptr().add(from).cast(), to - from, Advice::LinuxDontNeed) };
        debug_assert!(discarded.is_ok(), "discarding unlocked pages does not fail: {discarded:?}");
    }

    /// Finds the first page with memory from `range.start` on, and returns its offset.
    ///
    /// # Errors
    /// `ENOMEM` if the range ends beyond the mapping, `ENOSYS` where a sandbox has no such call.
    pub(crate) fn first_page_with_memory(&self, range: Range<usize>) -> io::Result<Option<usize>> {
        let page_bytes = rustix::param::page_size();
        let mut from = range.start / page_bytes * page_bytes;
        let end = range.end.next_multiple_of(page_bytes);
        if end > self.mapped_bytes {
            return Err(Errno::NOMEM.into());
        }
        let mut flags = vec![0_u8; PAGES_ASKED_MAX.min(end.saturating_sub(from) / page_bytes)];
        while from < end {
            let pages = flags.len().min((end - from) / page_bytes);
            // SAFETY: these pages belong to this mapping, and `flags` has a byte for each of them.
            let answer = unsafe {
                libc::mincore(self.start.as_ptr().add(from).cast(), pages * page_bytes, flags.as_mut_ptr().cast())
            };
            if answer != 0 {
                return Err(io::Error::last_os_error());
            }
            // This first question vectorises, and nearly always has the answer "none".
            let is_any = flags[..pages].iter().fold(0, |all, flag| all | flag) & 1 != 0;
            if is_any && let Some(page) = flags[..pages].iter().position(|flag| flag & 1 != 0) {
                return Ok(Some(from + page * page_bytes));
            }
            from += pages * page_bytes;
        }
        Ok(None)
    }

    pub(crate) fn mapped_bytes(&self) -> usize {
        self.mapped_bytes
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    fn map(mapped_bytes: usize, flags: MapFlags) -> io::Result<Self> {
        let writable = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: an anonymous mapping at an address that the kernel chooses overlaps no memory in use.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), mapped_bytes, writable, flags) };
        // Only the size can be invalid here. Sandboxes and valgrind report it with another error number.
        let start = start.map_err(|errno| if errno == Errno::INVAL { Errno::NOMEM } else { errno })?;
        let start = NonNull::new(start.cast()).ok_or(Errno::NOMEM)?;
        Ok(Self { start, mapped_bytes })
    }

    /// Maps `boundary` bytes more than needed and unmaps the excess on both sides.
    fn map_aligned(mapped_bytes: usize, boundary: usize, flags: MapFlags) -> io::Result<Self> {
        let wide_bytes = mapped_bytes.checked_add(boundary).ok_or(Errno::NOMEM)?;
        let mut mapping = Self::map(wide_bytes, flags)?;
        let head_bytes = mapping.start.as_ptr().align_offset(boundary);
        mapping.trim_start(head_bytes)?;
        mapping.trim_end(boundary - head_bytes)?;
        Ok(mapping)
    }

    fn trim_start(&mut self, bytes: usize) -> io::Result<()> {
        if bytes > 0 {
            // SAFETY: these whole pages belong to this mapping, which drops them here.
            unsafe { munmap(self.start.as_ptr().cast(), bytes) }?;
            // SAFETY: `bytes` is less than the mapped length, so the new start lies inside.
            self.start = unsafe { self.start.add(bytes) };
            self.mapped_bytes -= bytes;
        }
        Ok(())
    }

    fn trim_end(&mut self, bytes: usize) -> io::Result<()> {
        if bytes > 0 {
            let kept_bytes = self.mapped_bytes - bytes;
            // SAFETY: these whole pages belong to this mapping, which drops them here.
            unsafe { munmap(self.start.as_ptr().add(kept_bytes).cast(), bytes) }?;
            self.mapped_bytes = kept_bytes;
        }
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        #[cfg(simulated)]
        crate::mapped_bytes::subtract(self.mapped_bytes);
        // SAFETY: the range belongs to this mapping, whose only owner is dropped.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.mapped_bytes) };
        debug_assert!(unmapped.is_ok(), "unmapping a whole mapping does not fail: {unmapped:?}");
    }
}

/// Bytes of address space for a thread: its stack, and more than it allocates before its work begins.
const THREAD_BYTES: usize = 4 << 20;

/// Checks that the address space has room for `threads` more threads.
///
/// If a limit such as `ulimit -v` leaves room for a stack only, the C library or the standard library aborts the
/// process: neither can report that a new thread has no memory for its own data. This check makes it an error.
///
/// # Errors
/// `ENOMEM` if there is not enough room.
pub fn check_thread_memory(threads: usize) -> io::Result<()> {
    check_memory(threads.checked_mul(THREAD_BYTES).ok_or(io::ErrorKind::OutOfMemory)?)
}

/// Checks that the address space has room for `bytes` more bytes.
///
/// A small allocation that fails aborts the process. Code that is about to make many of them checks first.
///
/// # Errors
/// `ENOMEM` if there is not enough room.
pub fn check_memory(bytes: usize) -> io::Result<()> {
    // Nothing is written, so this costs no memory.
    Mapping::map(bytes, MapFlags::PRIVATE | MapFlags::NORESERVE).map(drop)
}

/// Rounds `len` up to whole pages. `ENOMEM` if no allocation can be that large.
fn whole_pages(len: usize) -> io::Result<usize> {
    let rounded = len.checked_next_multiple_of(rustix::param::page_size()).ok_or(Errno::NOMEM)?;
    if rounded > isize::MAX as usize {
        return Err(Errno::NOMEM.into());
    }
    Ok(rounded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "miri unmaps whole mappings only")]
    fn large_mappings_start_on_a_huge_page() {
        let huge = Alignment::HUGE.bytes() as usize;
        for len in [huge, huge + 1, 3 * huge - 1, 16 * huge] {
            let mapping = Mapping::new(len).unwrap();
            assert_eq!(mapping.start.as_ptr().addr() % huge, 0);
            assert!(mapping.mapped_bytes >= len && mapping.mapped_bytes < len + huge);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri unmaps whole mappings only")]
    fn the_excess_is_unmapped() {
        let len = 8 << 20;
        let mapping = Mapping::new(len).unwrap();
        assert_eq!(mapping.mapped_bytes, len);
        let start = mapping.start.as_ptr().addr();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let around: Vec<&str> = maps.lines().filter(|line| covers(line, start)).collect();
        assert_eq!(around.len(), 1, "one area holds the start:\n{maps}");
    }

    fn covers(line: &str, address: usize) -> bool {
        let (low, high) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let bound = |text| usize::from_str_radix(text, 16).unwrap();
        bound(low) <= address && address < bound(high)
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri has no kernel that could refuse")]
    fn absurd_sizes_are_errors() {
        for len in [usize::MAX, isize::MAX as usize, usize::MAX / 2 + 2, 1 << 55] {
            let refused = Mapping::new(len).unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(Errno::NOMEM.raw_os_error()), "for {len}");
        }
    }
}
