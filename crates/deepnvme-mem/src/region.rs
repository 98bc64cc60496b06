//! Memory to read from.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::device::{Device, StreamHandle};
use crate::raw_memory::{Owner, RawMemory};
use crate::rows::Rows;
use crate::strided::Strided;

/// Readable memory, and an owner that keeps it alive as long as any clone exists.
///
/// The bytes may belong to a Python tensor or a GPU, or be the target of I/O in flight, so they may change at any
/// time. A region therefore copies bytes and never returns a reference to them. Its length counts logical bytes: the
/// bytes of the elements in row-major order.
#[derive(Clone)]
pub struct Region {
    pub(crate) raw: RawMemory,
}

impl Region {
    /// Creates a region of contiguous memory.
    ///
    /// # Safety
    /// While `owner` is alive, `ptr` is valid for reads of `len` initialised bytes on `device`, from any thread.
    /// `owner` may be dropped on any thread. If something writes to the address, as the kernel does for a read, it is
    /// valid for writes as well.
    ///
    /// # Panics
    /// If `len` exceeds `isize::MAX`.
    #[must_use]
    pub unsafe fn from_raw(ptr: *mut u8, len: usize, device: Device, owner: Owner) -> Self {
        Self { raw: RawMemory::flat(ptr, len, device, owner) }
    }

    /// Creates a region of a tensor's elements. `ptr` is the address of the element at index zero of every dimension.
    ///
    /// # Safety
    /// As for [`Region::from_raw`], for each byte of each element.
    ///
    /// # Panics
    /// If [`Strided::check`] rejects the layout.
    #[must_use]
    #[expect(clippy::needless_pass_by_value, reason = "a layout belongs to one tensor")]
    pub unsafe fn from_strided(ptr: *mut u8, strides: Strided, device: Device, owner: Owner) -> Self {
        Self { raw: RawMemory::strided(ptr, &strides, device, owner) }
    }

    /// Turns a vector into a region without copying it. A simulation copies it.
    #[must_use]
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        Self { raw: from_vec(bytes) }
    }

    /// Returns the address of the first byte.
    #[must_use]
    pub fn addr(&self) -> usize {
        self.raw.addr()
    }

    /// Returns the number of logical bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.raw.len()
    }

    /// Returns whether the region is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the device of the memory.
    #[must_use]
    pub fn device(&self) -> Device {
        self.raw.device()
    }

    /// Returns the same GPU memory. Requests access it only after the work that `stream` has when they are submitted.
    /// Default: the device's default stream.
    #[must_use]
    pub fn after(self, stream: StreamHandle) -> Self {
        Self { raw: self.raw.after(stream) }
    }

    /// Returns the stream that accesses to the memory are ordered after.
    #[must_use]
    pub fn stream(&self) -> StreamHandle {
        self.raw.stream()
    }

    /// Calls `visit` for each run of equal rows in the logical bytes from `from` on, in order.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn visit_rows(&self, from: usize, len: usize, visit: impl FnMut(Rows)) {
        self.raw.visit_rows(from, len, visit);
    }

    /// Returns whether the bytes are contiguous.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        self.raw.is_contiguous()
    }

    /// Returns a range of contiguous memory, with the same owner.
    ///
    /// # Panics
    /// If the region is not contiguous or the range is out of bounds.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        Self { raw: self.raw.slice(range) }
    }

    /// Returns a strided view of contiguous memory. Its first element starts at `at`. Returns `None` if the view is
    /// out of bounds or the layout is invalid.
    ///
    /// # Panics
    /// If the region is not contiguous.
    #[must_use]
    pub fn view(&self, at: usize, layout: &Strided) -> Option<Self> {
        let raw = self.raw.view(at, layout)?;
        Some(Self { raw })
    }

    /// Fills `out` with the logical bytes from `at` on.
    ///
    /// # Panics
    /// If the range is out of bounds, or the memory is not on the host.
    pub fn copy_to_slice(&self, at: usize, out: &mut [u8]) {
        // SAFETY: a mutable slice is valid for writes of its length.
        unsafe { self.raw.copy_out(at, out.as_mut_ptr(), out.len()) }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({:?})", self.raw)
    }
}

/// A vector in parts, so that only the region's pointer reaches its bytes until it is reassembled.
struct VecParts {
    start: *mut u8,
    len: usize,
    capacity: usize,
}

// SAFETY: the parts are a `Vec<u8>`, which may be sent to and dropped on any thread.
unsafe impl Send for VecParts {}
// SAFETY: shared parts give no access.
unsafe impl Sync for VecParts {}

impl Drop for VecParts {
    fn drop(&mut self) {
        // SAFETY: these are the parts of one vector, reassembled once.
        drop(unsafe { Vec::from_raw_parts(self.start, self.len, self.capacity) });
    }
}

/// Offset of a simulated vector in its page. An execution must not depend on the alignment that the allocator happens
/// to choose.
#[cfg(simulated)]
const PAGE_OFFSET_BYTES: usize = 64;

pub(crate) fn from_vec(bytes: Vec<u8>) -> RawMemory {
    #[cfg(simulated)]
    if let Ok(mut buffer) = crate::Buffer::zeroed(PAGE_OFFSET_BYTES + bytes.len()) {
        buffer.as_mut_slice()[PAGE_OFFSET_BYTES..].copy_from_slice(&bytes);
        return buffer.into_region().raw.slice(PAGE_OFFSET_BYTES..PAGE_OFFSET_BYTES + bytes.len());
    }
    let mut bytes = std::mem::ManuallyDrop::new(bytes);
    let parts = VecParts { start: bytes.as_mut_ptr(), len: bytes.len(), capacity: bytes.capacity() };
    RawMemory::flat(parts.start, parts.len, Device::Host, Arc::new(parts))
}
