//! A reserved address range, of which only the written pages have memory.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use crate::mapping::Mapping;
use crate::{Alignment, Device, RegionMut};

/// A reserved address range. Pages get memory when they are written, and can be discarded again.
///
/// Pages without memory read as zeros. A tensor over the whole range looks complete to code that indexes rows of it,
/// while only these rows need memory.
///
/// ```
/// use deepnvme_mem::ReservedRange;
/// let reserved = ReservedRange::new(1 << 40, 4096)?;
/// reserved.region_mut(1 << 39..(1 << 39) + 5).copy_from_slice(0, b"bytes");
/// reserved.discard(0..1 << 40);
/// let mut bytes = [1; 5];
/// reserved.region_mut(1 << 39..(1 << 39) + 5).region().copy_to_slice(0, &mut bytes);
/// assert_eq!(bytes, [0; 5]);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ReservedRange {
    mapping: Arc<Mapping>,
    bytes: usize,
    page_bytes: usize,
}

/// Rows of at least this many huge pages waste little in the partly used pages at their ends.
const ROW_HUGE_PAGES_MIN: usize = 8;

impl ReservedRange {
    /// Reserves addresses for `bytes` bytes. For rows (`row_bytes`) of less than 16 MiB, small pages are requested,
    /// so that a row takes little more memory than its size.
    ///
    /// # Errors
    /// `ENOMEM` if the address space has no such range.
    ///
    /// # Panics
    /// If `bytes` is zero.
    pub fn new(bytes: usize, row_bytes: usize) -> io::Result<Self> {
        let page_bytes = Self::page_bytes_for(row_bytes);
        let mapping = Mapping::reserve(bytes, page_bytes)?;
        // A hint: the other page size works as well.
        let _ = mapping.advise_pages(page_bytes > rustix::param::page_size());
        Ok(Self { mapping: Arc::new(mapping), bytes, page_bytes })
    }

    /// Returns the page size that was requested. Pages count from the first byte on, and writing one byte may allocate
    /// a page.
    #[must_use]
    pub fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// Returns the page size for rows of that size.
    #[must_use]
    pub fn page_bytes_for(row_bytes: usize) -> usize {
        let huge_bytes = Alignment::HUGE.bytes() as usize;
        if row_bytes >= ROW_HUGE_PAGES_MIN * huge_bytes { huge_bytes } else { rustix::param::page_size() }
    }

    /// Returns the number of bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns a part of the range, to write to.
    ///
    /// # Panics
    /// If the range is out of bounds.
    #[must_use]
    pub fn region_mut(&self, range: Range<usize>) -> RegionMut {
        self.assert_inside(&range);
        let start = self.mapping.start().as_ptr().wrapping_add(range.start);
        let owner = Arc::clone(&self.mapping);
        // SAFETY: the range lies inside the mapping, which the owner keeps alive. Anonymous pages are zeroed bytes,
        // even after they were discarded.
        unsafe { RegionMut::from_raw(start, range.len(), Device::Host, owner) }
    }

    /// Frees the whole pages inside the range, which then reads as zeros. Partly covered pages keep their bytes.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn discard(&self, range: Range<usize>) {
        self.assert_inside(&range);
        // The rest of the last page is unused.
        let end = if range.end == self.bytes { self.mapping.mapped_bytes() } else { range.end };
        self.mapping.discard(range.start..end);
    }

    /// Finds the first page of the range that was read or written since it was reserved or discarded, and returns its
    /// offset. Pages count as [`small`](rustix::param::page_size) ones; partly covered pages are included.
    ///
    /// [`sees_used_pages`] says whether the answer can be trusted.
    ///
    /// # Errors
    /// That of `mincore`, which some sandboxes lack.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn first_used_page(&self, range: Range<usize>) -> io::Result<Option<usize>> {
        self.assert_inside(&range);
        self.mapping.first_page_with_memory(range)
    }

    fn assert_inside(&self, range: &Range<usize>) {
        let is_inside = range.start <= range.end && range.end <= self.bytes;
        assert!(is_inside, "{range:?} is outside a range of {} bytes", self.bytes);
    }
}

/// Whether [`ReservedRange::first_used_page`] finds the pages that were used, and no others.
///
/// Some sandboxes report that all pages have memory, and after `mlockall(MCL_FUTURE)` they do.
#[must_use]
pub fn sees_used_pages() -> bool {
    sees_used_pages_of_new_range().unwrap_or(false)
}

fn sees_used_pages_of_new_range() -> io::Result<bool> {
    let page_bytes = rustix::param::page_size();
    let range = ReservedRange::new(3 * page_bytes, page_bytes)?;
    let is_untouched = range.first_used_page(0..3 * page_bytes)?.is_none();
    let mut byte = [1];
    range.region_mut(page_bytes..page_bytes + 1).region().copy_to_slice(0, &mut byte);
    // Or the compiler leaves the read out.
    std::hint::black_box(byte);
    let found = range.first_used_page(0..3 * page_bytes)?;
    let is_after = range.first_used_page(2 * page_bytes..3 * page_bytes)?.is_none();
    Ok(is_untouched && found == Some(page_bytes) && is_after)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "miri has no mincore")]
    fn used_pages_are_found() {
        let page = rustix::param::page_size();
        // More pages than one system call asks about.
        let bytes = (200 << 10) * page;
        let reserved = ReservedRange::new(bytes, page).unwrap();
        assert!(sees_used_pages());
        assert_eq!(reserved.first_used_page(0..bytes).unwrap(), None);
        assert_eq!(reserved.first_used_page(5..5).unwrap(), None);
        let mut byte = [1];
        for at in [0, 7, 64 << 10, (200 << 10) - 1] {
            reserved.region_mut(at * page + 3..at * page + 4).region().copy_to_slice(0, &mut byte);
            std::hint::black_box(byte);
            for from in [0, at * page, at * page + 1, at * page + page - 1] {
                assert_eq!(reserved.first_used_page(from..bytes).unwrap(), Some(at * page), "from {from}");
            }
            assert_eq!(reserved.first_used_page(0..at * page).unwrap(), None);
            assert_eq!(reserved.first_used_page((at + 1) * page..bytes).unwrap(), None);
            reserved.discard(at * page..(at + 1) * page);
            assert_eq!(reserved.first_used_page(0..bytes).unwrap(), None, "page {at} was discarded");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri has no pages to give back")]
    fn discard_frees_whole_pages_and_keeps_partial_ones() {
        let reserved = ReservedRange::new(10 * 4096, 4096).unwrap();
        let all = reserved.region_mut(0..10 * 4096);
        all.copy_from_slice(0, &[7; 10 * 4096]);
        reserved.discard(4095..3 * 4096 + 1);
        let mut bytes = vec![0; 10 * 4096];
        all.region().copy_to_slice(0, &mut bytes);
        for (at, byte) in bytes.iter().enumerate() {
            assert_eq!(*byte, if (4096..3 * 4096).contains(&at) { 0 } else { 7 }, "at {at}");
        }
        reserved.discard(5 * 4096 + 1..6 * 4096);
        all.region().copy_to_slice(0, &mut bytes);
        assert_eq!(bytes[5 * 4096], 7, "no whole page is inside");
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri keeps all memory")]
    fn more_than_the_ram_can_be_reserved() {
        let reserved = ReservedRange::new(1 << 42, 4096).unwrap();
        reserved.region_mut((1 << 42) - 3..1 << 42).copy_from_slice(0, &[1, 2, 3]);
        let mut bytes = [0; 3];
        reserved.region_mut((1 << 42) - 3..1 << 42).region().copy_to_slice(0, &mut bytes);
        assert_eq!(bytes, [1, 2, 3]);
    }
}
