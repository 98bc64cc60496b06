//! Memory to read from.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::span::{Device, Owner, Span};
use crate::stream_handle::StreamHandle;
use crate::strided::Strided;

/// Memory that can be read, and an owner that keeps it alive for as long as any clone exists.
///
/// The bytes may be a Python tensor's, a GPU's, or the target of I/O in flight, so that they may change at any
/// time: a region copies bytes out and never lends them. Its length counts logical bytes: those of the elements,
/// in row-major order, wherever they lie.
#[derive(Clone)]
pub struct Region(pub(crate) Span);

impl Region {
    /// Contiguous memory.
    ///
    /// # Safety
    /// For as long as `owner` is alive, `ptr` is valid for reads of `len` initialised bytes on `device`, from any
    /// thread, and `owner` may be dropped on any thread. Where something writes to the region's address (the
    /// kernel does, on behalf of a read), it must be valid for writes too.
    ///
    /// # Panics
    /// When `len` is larger than any memory.
    #[must_use]
    pub unsafe fn from_raw(ptr: *mut u8, len: usize, device: Device, owner: Owner) -> Self {
        Self(Span::flat(ptr, len, device, owner))
    }

    /// The elements of a tensor; `ptr` is the address of its first one, at index zero of every dimension.
    ///
    /// # Safety
    /// As for [`Region::from_raw`], for each byte of each element.
    ///
    /// # Panics
    /// When [`Strided::check`] finds fault with the layout.
    #[must_use]
    #[expect(clippy::needless_pass_by_value, reason = "a layout belongs to one tensor")]
    pub unsafe fn from_strided(ptr: *mut u8, strides: Strided, device: Device, owner: Owner) -> Self {
        Self(Span::strided(ptr, &strides, device, owner))
    }

    /// The bytes of a vector, without copying them.
    #[must_use]
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        Self(from_vec(bytes))
    }

    /// The address of the first byte.
    #[must_use]
    pub fn addr(&self) -> usize {
        self.0.addr()
    }

    /// Logical bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where the memory lives.
    #[must_use]
    pub fn device(&self) -> Device {
        self.0.device()
    }

    /// The same memory of a GPU, to be looked at when the work that this stream has been given by now is done. Default: the
    /// device's default stream.
    #[must_use]
    pub fn after(self, stream: StreamHandle) -> Self {
        Self(self.0.after(stream))
    }

    /// The stream whose work so far comes first.
    #[must_use]
    pub fn stream(&self) -> StreamHandle {
        self.0.stream()
    }

    /// Visits the pieces of memory that the logical bytes from `from` on are, in their order: the address of the first of
    /// some equal ones, how long and how many they are, and how far apart.
    ///
    /// # Panics
    /// When the range is not inside the region.
    pub fn each_row(&self, from: usize, len: usize, visit: impl FnMut(usize, usize, usize, isize)) {
        self.0.each_row(from, len, visit);
    }

    /// Whether the bytes lie side by side from the address on.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        self.0.is_contiguous()
    }

    /// A part of contiguous memory, with the same owner.
    ///
    /// # Panics
    /// When the region is not contiguous or the range is not inside it.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        Self(self.0.slice(range))
    }

    /// The elements of that layout in contiguous memory, the first of which begins at `at`; `None` where they reach
    /// beyond it, or the layout makes no sense.
    ///
    /// # Panics
    /// When the region is not contiguous.
    #[must_use]
    pub fn view(&self, at: usize, layout: &Strided) -> Option<Self> {
        self.0.view(at, layout).map(Self)
    }

    /// Copies the logical bytes from `at` on to fill `out`.
    ///
    /// # Panics
    /// When the range is not inside the region, or the region is not in the processor's memory.
    pub fn copy_to_slice(&self, at: usize, out: &mut [u8]) {
        // SAFETY: a mutable slice is valid for writes of its length.
        unsafe { self.0.copy_out(at, out.as_mut_ptr(), out.len()) }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({:?})", self.0)
    }
}

/// A vector taken apart, so that nothing but the region's pointer leads to its bytes until it is put together again.
struct Parts {
    start: *mut u8,
    len: usize,
    capacity: usize,
}

// SAFETY: the parts are a `Vec<u8>`, which may be sent and dropped anywhere.
unsafe impl Send for Parts {}
// SAFETY: shared parts give no access at all.
unsafe impl Sync for Parts {}

impl Drop for Parts {
    fn drop(&mut self) {
        // SAFETY: these are the parts of one vector, and this is the only time that they are put together.
        drop(unsafe { Vec::from_raw_parts(self.start, self.len, self.capacity) });
    }
}

/// How far behind a page a simulated vector begins: the alignment that an allocator happens to choose must not decide what
/// an execution does.
#[cfg(simulated)]
const SKEW_BYTES: usize = 64;

pub(crate) fn from_vec(bytes: Vec<u8>) -> Span {
    #[cfg(simulated)]
    if let Ok(mut buffer) = crate::Buffer::zeroed(SKEW_BYTES + bytes.len()) {
        buffer.as_mut_slice()[SKEW_BYTES..].copy_from_slice(&bytes);
        return buffer.into_region().0.slice(SKEW_BYTES..SKEW_BYTES + bytes.len());
    }
    let mut bytes = std::mem::ManuallyDrop::new(bytes);
    let parts = Parts { start: bytes.as_mut_ptr(), len: bytes.len(), capacity: bytes.capacity() };
    Span::flat(parts.start, parts.len, Device::Host, Arc::new(parts))
}
