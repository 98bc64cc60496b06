//! A long range of addresses, few of whose pages have memory at any time.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use crate::mapping::Mapping;
use crate::{Alignment, Device, RegionMut};

/// A range of addresses that costs memory only where somebody has written, and can give that memory back.
///
/// What has no memory reads as zeros. A tensor over all of it looks whole to whoever picks rows of it, while only those
/// rows have to be there.
///
/// ```
/// use deepnvme_mem::Reserved;
/// let reserved = Reserved::new(1 << 40, 4096)?;
/// reserved.target(1 << 39..(1 << 39) + 5).copy_from_slice(0, b"bytes");
/// reserved.discard(0..1 << 40);
/// let mut bytes = [1; 5];
/// reserved.target(1 << 39..(1 << 39) + 5).region().copy_to_slice(0, &mut bytes);
/// assert_eq!(bytes, [0; 5]);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Reserved {
    mapping: Arc<Mapping>,
    len: usize,
    page_bytes: usize,
}

/// Pieces of so many huge pages are worth the part of one that sticks out on either side.
const HUGE_PAGES_MIN: usize = 8;

impl Reserved {
    /// `len` bytes of addresses. Where pieces of less than 16 MiB are put there and given back (`piece_bytes`), the kernel is
    /// asked for small pages, so that a piece costs no more than itself.
    ///
    /// # Errors
    /// `ENOMEM` when there is no such range of addresses.
    ///
    /// # Panics
    /// When `len` is zero.
    pub fn new(len: usize, piece_bytes: usize) -> io::Result<Self> {
        let page_bytes = Self::page_bytes_for(piece_bytes);
        let mapping = Mapping::reserve(len, page_bytes)?;
        // Advice: pages of the other kind are as right.
        let _ = mapping.advise_pages(page_bytes > rustix::param::page_size());
        Ok(Self { mapping: Arc::new(mapping), len, page_bytes })
    }

    /// What memory comes in, counted from the first byte on: whoever writes one byte may get so many.
    #[must_use]
    pub fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// What memory will come in for pieces of that size.
    #[must_use]
    pub fn page_bytes_for(piece_bytes: usize) -> usize {
        let huge_bytes = Alignment::HUGE.bytes() as usize;
        if piece_bytes >= HUGE_PAGES_MIN * huge_bytes { huge_bytes } else { rustix::param::page_size() }
    }

    /// Bytes of addresses.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The right to fill a part of it.
    ///
    /// # Panics
    /// When the range is not inside.
    #[must_use]
    pub fn target(&self, range: Range<usize>) -> RegionMut {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} is outside of {} bytes", self.len);
        let start = self.mapping.start().as_ptr().wrapping_add(range.start);
        let owner = Arc::clone(&self.mapping);
        // SAFETY: the range lies inside the mapping, which the owner keeps; anonymous pages are zeroed bytes, also after
        // they were given back.
        unsafe { RegionMut::from_raw(start, range.len(), Device::Host, owner) }
    }

    /// Gives back the memory of the whole pages inside that range: it reads as zeros from then on. Pages that stick out on
    /// either side keep what they have.
    ///
    /// # Panics
    /// When the range is not inside.
    pub fn discard(&self, range: Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} is outside of {} bytes", self.len);
        // Behind the last byte there is nothing that anybody could want.
        let end = if range.end == self.len { self.mapping.mapped_bytes() } else { range.end };
        self.mapping.discard(range.start..end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "miri has no pages to give back")]
    fn whole_pages_are_given_back_and_ragged_edges_are_kept() {
        let reserved = Reserved::new(10 * 4096, 4096).unwrap();
        let all = reserved.target(0..10 * 4096);
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
    fn much_more_than_there_is_can_be_reserved() {
        let reserved = Reserved::new(1 << 42, 4096).unwrap();
        reserved.target((1 << 42) - 3..1 << 42).copy_from_slice(0, &[1, 2, 3]);
        let mut bytes = [0; 3];
        reserved.target((1 << 42) - 3..1 << 42).region().copy_to_slice(0, &mut bytes);
        assert_eq!(bytes, [1, 2, 3]);
    }
}
