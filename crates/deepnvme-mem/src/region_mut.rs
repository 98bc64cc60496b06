//! Memory to write to.

use std::fmt;
use std::sync::Arc;

use crate::buffer::Buffer;
use crate::region::{Region, from_vec};
use crate::span::{Device, Owner, Span};
use crate::stream_handle::StreamHandle;
use crate::strided::Strided;

/// The one right to change some memory, and an owner that keeps the memory alive.
///
/// It cannot be cloned, but [`RegionMut::region`] gives out the same memory for reading and for the kernel.
/// Copying into it takes `&self`, since several workers fill one request at once. The rule for them: **copies
/// that run at the same time must be disjoint.** Where two overlap, or overlap with I/O in flight, the bytes in
/// the overlap are unspecified.
pub struct RegionMut(pub(crate) Span);

impl RegionMut {
    /// Contiguous memory.
    ///
    /// # Safety
    /// For as long as `owner` is alive, `ptr` is valid for reads and writes of `len` initialised bytes on `device`,
    /// from any thread; no reference to them is used meanwhile; and `owner` may be dropped on any thread.
    ///
    /// # Panics
    /// When `len` is larger than any memory.
    #[must_use]
    pub unsafe fn from_raw(ptr: *mut u8, len: usize, device: Device, owner: Owner) -> Self {
        Self(Span::flat(ptr, len, device, owner))
    }

    /// The elements of a tensor; `ptr` is the address of its first one, at index zero of every dimension.
    ///
    /// Where elements share bytes ([`Strided::may_overlap`]), such bytes hold any one of the values written.
    ///
    /// # Safety
    /// As for [`RegionMut::from_raw`], for each byte of each element.
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

    /// The same memory of a GPU, to be changed when the work that this stream has been given by now is done. Default: the
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

    /// Whether the bytes lie side by side from the address on.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        self.0.is_contiguous()
    }

    /// The same memory: its address for the kernel, or its bytes to read once they are complete.
    #[must_use]
    pub fn region(&self) -> Region {
        Region(self.0.clone())
    }

    /// Asks the kernel to back this memory with huge pages where it has no pages yet: filling fresh memory then costs
    /// one page fault for 2 MiB instead of 512. Changes no byte; false when the kernel does not take the advice, or
    /// where a trial on the first MiB of large memory has shown that small pages come sooner.
    pub fn advise_huge(&self) -> bool {
        self.0.advise_huge()
    }

    /// Two rights from one: to the bytes before `mid`, and to those from it on.
    ///
    /// # Panics
    /// When the region is not contiguous or `mid` is not inside it.
    #[must_use]
    pub fn split_at(self, mid: usize) -> (Self, Self) {
        (Self(self.0.slice(0..mid)), Self(self.0.slice(mid..self.len())))
    }

    /// One right from two, to memory that lies side by side and has the same owner: the reverse of [`split_at`](Self::split_at).
    ///
    /// # Errors
    /// Gives both back where they do not.
    pub fn join(self, next: Self) -> Result<Self, (Self, Self)> {
        match self.0.join(&next.0) {
            Some(joined) => Ok(Self(joined)),
            None => Err((self, next)),
        }
    }

    /// Copies `source` over the logical bytes from `at` on. See the type about copies at the same time.
    ///
    /// # Panics
    /// When the range is not inside the region, or the region is not in the processor's memory.
    pub fn copy_from_slice(&self, at: usize, source: &[u8]) {
        // SAFETY: a slice is valid for reads of its length, and this type is the right to write.
        unsafe { self.0.copy_in(at, source.as_ptr(), source.len()) }
    }

    /// As [`copy_from_slice`](Self::copy_from_slice), past the processor's caches: for bytes that are read much later.
    ///
    /// # Panics
    /// As there.
    pub fn copy_past_cache(&self, at: usize, source: &[u8]) {
        // SAFETY: a slice is valid for reads of its length, and this type is the right to write.
        unsafe { self.0.copy_in_past_cache(at, source) }
    }

    /// The buffer that this region was made from.
    ///
    /// # Errors
    /// Gives itself back when it was not made by [`Buffer::into_region`], is only a part of that buffer, or when
    /// another region of the same memory is alive (I/O in flight holds one).
    pub fn into_buffer(self) -> Result<Buffer, Self> {
        let is_all_of = |buffer: &Buffer, span: &Span| buffer.addr() == span.addr() && buffer.len() == span.len();
        self.0.into_owner(is_all_of).map_err(Self)
    }
}

impl Buffer {
    /// The buffer as memory to read into or write from; [`RegionMut::into_buffer`] is the way back.
    #[must_use]
    pub fn into_region(self) -> RegionMut {
        let (start, len) = (self.start(), self.len());
        // SAFETY: the owner is the buffer itself, and nobody else can reach its bytes while it is an owner.
        unsafe { RegionMut::from_raw(start, len, Device::Host, Arc::new(self)) }
    }
}

impl fmt::Debug for RegionMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RegionMut({:?})", self.0)
    }
}
