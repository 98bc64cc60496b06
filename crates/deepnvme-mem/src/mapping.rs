//! Anonymous memory from the kernel: mapped, aligned, unmapped when dropped.

use std::io;
use std::ops::Range;
use std::ptr::{self, NonNull};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::Alignment;

/// Whole pages of zeroed, private memory. Never empty.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    mapped_bytes: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread, and this value is its only owner.
unsafe impl Send for Mapping {}
// SAFETY: a shared mapping only tells its address and asks the kernel for advice.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps at least `len` bytes; from 2 MiB on, the start lies on a huge page's boundary.
    ///
    /// # Errors
    /// `ENOMEM` when the kernel has no such range, also for sizes beyond any address.
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        assert!(len > 0, "a mapping has at least one byte");
        let mapped_bytes = whole_pages(len)?;
        let huge = Alignment::HUGE.bytes() as usize;
        let made = if len < huge {
            Self::map(mapped_bytes, MapFlags::PRIVATE)
        } else {
            Self::on_boundary(mapped_bytes, huge, MapFlags::PRIVATE)
        };
        made.inspect(Self::count)
    }

    #[cfg(simulated)]
    fn count(&self) {
        crate::simulated::take(self.mapped_bytes);
    }

    #[cfg(not(simulated))]
    fn count(&self) {}

    /// Maps at least `len` bytes, for which the kernel sets no memory aside. The start lies on the boundary of a page of
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
            Self::on_boundary(mapped_bytes, page_bytes, flags)
        };
        made.inspect(Self::count)
    }

    /// Asks for huge pages, or for small ones; whether the kernel took the advice.
    pub(crate) fn advise_pages(&self, are_huge: bool) -> bool {
        let advice = if are_huge { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
        // SAFETY: the range is exactly this mapping, and the advice changes no byte of it.
        unsafe { madvise(self.start.as_ptr().cast(), self.mapped_bytes, advice) }.is_ok()
    }

    /// Gives back the whole pages inside a range, which then read as zeros.
    pub(crate) fn discard(&self, range: Range<usize>) {
        let page_bytes = rustix::param::page_size();
        let (from, to) = (range.start.next_multiple_of(page_bytes), range.end / page_bytes * page_bytes);
        if from >= to || to > self.mapped_bytes {
            return;
        }
        // SAFETY: the pages are inside this private anonymous mapping, and nobody has a reference to its bytes: whoever
        // reads them finds zeros instead.
        let given = unsafe { madvise(self.start.as_ptr().add(from).cast(), to - from, Advice::LinuxDontNeed) };
        debug_assert!(given.is_ok(), "giving back own pages does not fail, unless they are locked: {given:?}");
    }

    /// Asks for huge pages; whether the kernel took the advice.
    pub(crate) fn advise_huge(&self) -> bool {
        // SAFETY: the range is exactly this mapping, and the advice changes no byte of it.
        unsafe { madvise(self.start.as_ptr().cast(), self.mapped_bytes, Advice::LinuxHugepage) }.is_ok()
    }

    pub(crate) fn mapped_bytes(&self) -> usize {
        self.mapped_bytes
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(crate) fn map(mapped_bytes: usize, flags: MapFlags) -> io::Result<Self> {
        let writable = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches no memory in use.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), mapped_bytes, writable, flags) };
        // Of what we ask for, only the size can be wrong; sandboxes and valgrind say so with another number.
        let start = start.map_err(|errno| if errno == Errno::INVAL { Errno::NOMEM } else { errno })?;
        let start = NonNull::new(start.cast()).ok_or(Errno::NOMEM)?;
        Ok(Self { start, mapped_bytes })
    }

    /// Maps `boundary` bytes more than needed and gives back what sticks out on either side.
    fn on_boundary(mapped_bytes: usize, boundary: usize, flags: MapFlags) -> io::Result<Self> {
        let wide_bytes = mapped_bytes.checked_add(boundary).ok_or(Errno::NOMEM)?;
        let mut mapping = Self::map(wide_bytes, flags)?;
        let head_bytes = mapping.start.as_ptr().align_offset(boundary);
        mapping.give_back_head(head_bytes)?;
        mapping.give_back_tail(boundary - head_bytes)?;
        Ok(mapping)
    }

    fn give_back_head(&mut self, bytes: usize) -> io::Result<()> {
        if bytes > 0 {
            // SAFETY: these whole pages are this mapping's own, and it forgets them at once.
            unsafe { munmap(self.start.as_ptr().cast(), bytes) }?;
            // SAFETY: `bytes` is less than what is mapped, so the new start lies inside.
            self.start = unsafe { self.start.add(bytes) };
            self.mapped_bytes -= bytes;
        }
        Ok(())
    }

    fn give_back_tail(&mut self, bytes: usize) -> io::Result<()> {
        if bytes > 0 {
            let kept_bytes = self.mapped_bytes - bytes;
            // SAFETY: these whole pages are this mapping's own, and it forgets them at once.
            unsafe { munmap(self.start.as_ptr().add(kept_bytes).cast(), bytes) }?;
            self.mapped_bytes = kept_bytes;
        }
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        #[cfg(simulated)]
        crate::simulated::give(self.mapped_bytes);
        // SAFETY: the range is this mapping's own, and its last owner is going away.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.mapped_bytes) };
        debug_assert!(unmapped.is_ok(), "unmapping a whole mapping does not fail: {unmapped:?}");
    }
}

/// `len` in whole pages, or `ENOMEM` when no allocation can be that large.
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
    fn what_sticks_out_is_given_back() {
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
