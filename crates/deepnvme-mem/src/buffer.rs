//! Zeroed, page-aligned memory with one owner.

use std::io;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;

use crate::lock::{LockState, lock};
use crate::mapping::Mapping;
use crate::{Alignment, numa};

/// Zeroed memory of a fixed length that starts on a page. It is unmapped when dropped.
///
/// From 2 MiB on, it starts on a huge-page boundary and the kernel is asked for huge pages. For buffers of
/// [`zeroed_each`](Self::zeroed_each), that holds for all of them together. Untouched pages cost no memory. An empty
/// buffer has an address as well.
///
/// ```
/// use deepnvme_mem::Buffer;
/// let mut buffer = Buffer::zeroed(10_000)?;
/// buffer.as_mut_slice()[0] = 7;
/// assert_eq!(buffer.addr() % 4096, 0);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Buffer {
    /// Shared with buffers over other ranges of it.
    mapping: Option<Arc<Mapping>>,
    /// Offset of the first byte in the mapping.
    at: usize,
    len: usize,
    lock_state: LockState,
    huge_advised: bool,
}

impl Buffer {
    /// Allocates `len` zeroed bytes of ordinary memory.
    ///
    /// # Errors
    /// `ENOMEM` if the address space has no such range.
    pub fn zeroed(len: usize) -> io::Result<Self> {
        let mapping = if len == 0 { None } else { Some(Mapping::new(len)?) };
        let huge_advised =
            len as u64 >= Alignment::HUGE.bytes() && mapping.as_ref().is_some_and(|mapping| mapping.advise_pages(true));
        Ok(Self { mapping: mapping.map(Arc::new), at: 0, len, lock_state: LockState::NotRequested, huge_advised })
    }

    /// Allocates buffers of these lengths in one mapping. The kernel bounds the mappings of a process (65,530 by
    /// default), and a process may need more buffers. Each buffer starts on a page. The mapping is freed with the last
    /// of them.
    ///
    /// ```
    /// let buffers = deepnvme_mem::Buffer::zeroed_each(&[10_000, 1])?;
    /// assert_eq!(buffers[1].addr() - buffers[0].addr(), 3 * 4096);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    /// `ENOMEM` (or the kind `OutOfMemory`) if the address space has no room for all of them.
    pub fn zeroed_each(lens: &[usize]) -> io::Result<Vec<Self>> {
        let page_bytes = Alignment::PAGE.bytes() as usize;
        let mut begins = Vec::with_capacity(lens.len());
        let mut end: usize = 0;
        for len in lens {
            begins.push(end);
            let next = len.checked_next_multiple_of(page_bytes).and_then(|pages| end.checked_add(pages));
            end = next.ok_or(io::ErrorKind::OutOfMemory)?;
        }
        let all = Self::zeroed(end)?;
        let part = |(at, len): (usize, &usize)| Self {
            mapping: all.mapping.clone().filter(|_| *len > 0),
            at,
            len: *len,
            lock_state: LockState::NotRequested,
            huge_advised: all.huge_advised,
        };
        Ok(begins.into_iter().zip(lens).map(part).collect())
    }

    /// Allocates `len` zeroed bytes, locked into RAM if the kernel allows it. [`Buffer::lock_state`] returns the
    /// outcome.
    ///
    /// Locking touches every page: the time is proportional to `len`, and the memory is local to the calling thread's
    /// NUMA node.
    ///
    /// # Errors
    /// `ENOMEM` if the address space has no such range. A refused lock is not an error.
    pub fn locked(len: usize) -> io::Result<Self> {
        let mut buffer = Self::zeroed(len)?;
        buffer.lock_state = match &buffer.mapping {
            Some(mapping) => lock(mapping.start(), len),
            None => LockState::Locked,
        };
        Ok(buffer)
    }

    /// Allocates `len` zeroed bytes, preferably on NUMA node `node`. With `lock_pages`, they are locked as by
    /// [`locked`](Self::locked).
    ///
    /// # Errors
    /// As [`locked`](Self::locked).
    pub fn on_node(len: usize, lock_pages: bool, node: u32) -> io::Result<Self> {
        let mut buffer = Self::zeroed(len)?;
        if let Some(mapping) = &buffer.mapping {
            // A hint: memory of another node is slower, but works.
            let _ = numa::prefer(mapping.start(), len, node);
            if lock_pages {
                buffer.lock_state = lock(mapping.start(), len);
            }
        }
        Ok(buffer)
    }

    /// Returns the number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the buffer is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of the first byte, a multiple of [`PAGE_BYTES`](crate::PAGE_BYTES).
    #[must_use]
    pub fn addr(&self) -> usize {
        self.start().expose_provenance()
    }

    /// Returns the bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `start` points at `len` mapped, initialised bytes, or none. Only this value can change them:
        // buffers of one mapping never overlap.
        unsafe { slice::from_raw_parts(self.start(), self.len) }
    }

    /// Returns the bytes, to write to.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as for `as_slice`, and the buffer is borrowed for as long as the slice lives.
        unsafe { slice::from_raw_parts_mut(self.start(), self.len) }
    }

    /// Returns whether the buffer is locked into RAM.
    #[must_use]
    pub fn lock_state(&self) -> &LockState {
        &self.lock_state
    }

    /// Returns whether the kernel accepted `MADV_HUGEPAGE`. It is not asked below 2 MiB.
    #[must_use]
    pub fn huge_advised(&self) -> bool {
        self.huge_advised
    }

    /// Returns the first byte, or an aligned dangling address if the buffer is empty.
    pub(crate) fn start(&self) -> *mut u8 {
        let nothing = ptr::without_provenance_mut(Alignment::PAGE.bytes() as usize);
        let Some(mapping) = &self.mapping else { return nothing };
        // SAFETY: a buffer starts inside its mapping.
        unsafe { NonNull::as_ptr(mapping.start()).add(self.at) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "miri unmaps whole mappings only")]
    fn is_zeroed_and_starts_on_a_page() {
        for len in [1, 4095, 4096, 100_000, (2 << 20) - 1, 2 << 20, (5 << 20) + 3] {
            let mut buffer = Buffer::zeroed(len).unwrap();
            assert_eq!((buffer.len(), buffer.addr() % 4096), (len, 0));
            assert!(buffer.as_slice().iter().all(|byte| *byte == 0));
            buffer.as_mut_slice().fill(0xa5);
            assert_eq!(buffer.as_slice()[len - 1], 0xa5);
            assert_eq!(buffer.lock_state(), &LockState::NotRequested);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri unmaps whole mappings only")]
    fn buffers_of_one_mapping_do_not_overlap() {
        for lens in [vec![], vec![0, 0], vec![1, 4096, 0, 9000, 4097], vec![3 << 20, 70_000, 5 << 20]] {
            let mut buffers = Buffer::zeroed_each(&lens).unwrap();
            assert_eq!(buffers.iter().map(Buffer::len).collect::<Vec<_>>(), lens);
            for (index, buffer) in buffers.iter_mut().enumerate() {
                assert!(buffer.addr().is_multiple_of(4096) && buffer.as_slice().iter().all(|byte| *byte == 0));
                buffer.as_mut_slice().fill(index as u8 + 1);
            }
            // The mapping stays until the last buffer is dropped.
            while !buffers.is_empty() {
                let index = buffers.len() as u8;
                let buffer = buffers.remove(buffers.len() - 1);
                assert!(buffer.as_slice().iter().all(|byte| *byte == index));
                let returned = buffer.into_region().into_buffer().unwrap();
                assert!(returned.as_slice().iter().all(|byte| *byte == index));
            }
        }
        assert_eq!(Buffer::zeroed_each(&[usize::MAX, 1]).unwrap_err().kind(), io::ErrorKind::OutOfMemory);
        assert_eq!(Buffer::zeroed_each(&[usize::MAX / 2; 3]).unwrap_err().kind(), io::ErrorKind::OutOfMemory);
    }

    #[test]
    fn an_empty_buffer_has_an_address_and_no_bytes() {
        for buffer in [Buffer::zeroed(0).unwrap(), Buffer::locked(0).unwrap()] {
            assert!(buffer.is_empty() && buffer.as_slice().is_empty());
            assert_eq!(buffer.addr(), 4096);
            let back = buffer.into_region().into_buffer().unwrap();
            assert_eq!(back.len(), 0);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri unmaps whole mappings only")]
    fn huge_pages_are_requested_from_two_mebibytes_on() {
        assert!(!Buffer::zeroed((2 << 20) - 1).unwrap().huge_advised());
        let buffer = Buffer::zeroed(2 << 20).unwrap();
        assert_eq!(buffer.addr() % (2 << 20), 0);
        let offered = std::fs::exists("/sys/kernel/mm/transparent_hugepage/enabled").unwrap();
        assert_eq!(buffer.huge_advised(), offered);
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri has no kernel that could refuse")]
    fn absurd_sizes_are_errors() {
        for len in [usize::MAX, usize::MAX - 4096, isize::MAX as usize] {
            assert_eq!(Buffer::zeroed(len).unwrap_err().kind(), io::ErrorKind::OutOfMemory);
            assert_eq!(Buffer::locked(len).unwrap_err().kind(), io::ErrorKind::OutOfMemory);
        }
    }

    #[test]
    fn a_region_turns_back_into_its_buffer() {
        let mut buffer = Buffer::zeroed(9000).unwrap();
        buffer.as_mut_slice()[8999] = 42;
        let address = buffer.addr();
        let back = buffer.into_region().into_buffer().unwrap();
        assert_eq!((back.addr(), back.len(), back.as_slice()[8999]), (address, 9000, 42));
    }
}
