//! Memory to write to.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use crate::buffer::Buffer;
use crate::device::{Device, StreamHandle};
use crate::raw_memory::{Owner, RawMemory};
use crate::region::{Region, from_vec};
use crate::strided::Strided;

/// Writable memory, and an owner that keeps it alive.
///
/// A `RegionMut` is not cloneable, but [`RegionMut::region`] gives access to the same memory for reading and for the
/// kernel. Copying into it takes `&self`, since several workers fill one request at once. **Concurrent copies must be
/// disjoint.** Where two overlap, or one overlaps with I/O in flight, the bytes in the overlap are unspecified.
pub struct RegionMut {
    region: Region,
}

/// A `RegionMut` can do what a [`Region`] can, as a `&mut T` can do what a `&T` can.
impl Deref for RegionMut {
    type Target = Region;

    fn deref(&self) -> &Region {
        &self.region
    }
}

impl RegionMut {
    pub(crate) fn of(raw: RawMemory) -> Self {
        Self { region: Region { raw } }
    }

    /// Creates a region of contiguous memory.
    ///
    /// # Safety
    /// While `owner` is alive, `ptr` is valid for reads and writes of `len` initialised bytes on `device`, from any
    /// thread, and no reference to them is used. `owner` may be dropped on any thread.
    ///
    /// # Panics
    /// If `len` exceeds `isize::MAX`.
    #[must_use]
    pub unsafe fn from_raw(ptr: *mut u8, len: usize, device: Device, owner: Owner) -> Self {
        Self::of(RawMemory::flat(ptr, len, device, owner))
    }

    /// Creates a region of a tensor's elements. `ptr` is the address of the element at index zero of every dimension.
    ///
    /// If elements share bytes ([`Strided::may_overlap`]), these hold any one of the values written.
    ///
    /// # Safety
    /// As for [`RegionMut::from_raw`], for each byte of each element.
    ///
    /// # Panics
    /// If [`Strided::check`] rejects the layout.
    #[must_use]
    #[expect(clippy::needless_pass_by_value, reason = "a layout belongs to one tensor")]
    pub unsafe fn from_strided(ptr: *mut u8, strides: Strided, device: Device, owner: Owner) -> Self {
        Self::of(RawMemory::strided(ptr, &strides, device, owner))
    }

    /// Makes the memory of a region writable.
    ///
    /// # Safety
    /// While the owner is alive, the bytes of the region are valid for writes from any thread, and no reference to them
    /// is used.
    #[must_use]
    pub unsafe fn from_region(region: Region) -> Self {
        Self { region }
    }

    /// Turns a vector into a region without copying it.
    #[must_use]
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        Self::of(from_vec(bytes))
    }

    /// Returns the same GPU memory. Requests access it only after the work that `stream` has when they are submitted.
    /// Default: the device's default stream.
    #[must_use]
    pub fn after(self, stream: StreamHandle) -> Self {
        Self::of(self.region.raw.after(stream))
    }

    /// Returns the same memory, for the kernel or to read the bytes once they are complete.
    #[must_use]
    pub fn region(&self) -> Region {
        self.region.clone()
    }

    /// Requests huge pages for the parts that have no pages yet: filling fresh memory then costs one page fault per 2
    /// MiB instead of 512. Changes no byte. Returns false if the kernel refuses, the memory contains no whole huge page
    /// of the host, or a trial on large memory found small pages to be faster.
    pub fn advise_huge(&self) -> bool {
        self.raw.advise_huge()
    }

    /// Splits the region into the bytes before `mid` and those from `mid` on.
    ///
    /// # Panics
    /// If the region is not contiguous or `mid` is out of bounds.
    #[must_use]
    pub fn split_at(self, mid: usize) -> (Self, Self) {
        (Self::of(self.raw.slice(0..mid)), Self::of(self.raw.slice(mid..self.len())))
    }

    /// Joins two adjacent regions of one owner: the inverse of [`split_at`](Self::split_at).
    ///
    /// # Errors
    /// Returns both regions if they are not adjacent, or have different owners or devices.
    pub fn join(self, next: Self) -> Result<Self, (Self, Self)> {
        match self.raw.join(&next.raw) {
            Some(joined) => Ok(Self::of(joined)),
            None => Err((self, next)),
        }
    }

    /// Copies `source` over the logical bytes from `at` on. Concurrent copies must be disjoint.
    ///
    /// # Panics
    /// If the range is out of bounds, or the memory is not on the host.
    pub fn copy_from_slice(&self, at: usize, source: &[u8]) {
        // SAFETY: a slice is valid for reads of its length, and a `RegionMut` is writable.
        unsafe { self.raw.copy_in(at, source.as_ptr(), source.len()) }
    }

    /// Copies as [`copy_from_slice`](Self::copy_from_slice) with non-temporal stores, for bytes that are read much
    /// later.
    ///
    /// # Panics
    /// As [`copy_from_slice`](Self::copy_from_slice).
    pub fn copy_non_temporal(&self, at: usize, source: &[u8]) {
        // SAFETY: a slice is valid for reads of its length, and a `RegionMut` is writable.
        unsafe { self.raw.copy_in_non_temporal(at, source) }
    }

    /// Copies all bytes of another region on the host over the logical bytes from `at` on, for bytes that are read much
    /// later. Concurrent copies must be disjoint.
    ///
    /// # Panics
    /// If the range is out of bounds, or one of the two is not on the host.
    pub fn copy_from_region(&self, at: usize, source: &Region) {
        // SAFETY: a `RegionMut` is writable.
        unsafe { self.raw.copy_region_in(at, &source.raw) }
    }

    /// Returns the buffer that this region was created from.
    ///
    /// # Errors
    /// Returns itself if it was not created by [`Buffer::into_region`], is only a part of the buffer, or another
    /// region of the same memory is alive (I/O in flight holds one).
    pub fn into_buffer(self) -> Result<Buffer, Self> {
        let is_all_of = |buffer: &Buffer, raw: &RawMemory| buffer.addr() == raw.addr() && buffer.len() == raw.len();
        self.region.raw.into_owner(is_all_of).map_err(Self::of)
    }
}

impl Buffer {
    /// Turns the buffer into a region. [`RegionMut::into_buffer`] is the inverse.
    #[must_use]
    pub fn into_region(self) -> RegionMut {
        let (start, len) = (self.start(), self.len());
        // SAFETY: the owner is the buffer itself, and its bytes are unreachable while it is an owner.
        unsafe { RegionMut::from_raw(start, len, Device::Host, Arc::new(self)) }
    }
}

impl fmt::Debug for RegionMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RegionMut({:?})", self.raw)
    }
}
