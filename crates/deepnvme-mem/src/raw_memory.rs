//! The common part of `Region` and `RegionMut`: an address, and copies from and to it.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use crate::copy_2d::Copy2d;
use crate::device::{Device, StreamHandle};
use crate::multi_index::Dim;
use crate::non_temporal;
use crate::rows::Rows;
use crate::runs::Runs;
use crate::strided::Strided;

/// Bytes of a copy between regions that goes through a buffer. It stays in the caches.
const STEP_BYTES: usize = 256 << 10;

/// Keeps memory alive. The memory is freed when the last clone is dropped, on any thread.
pub type Owner = Arc<dyn Any + Send + Sync>;

/// Bytes that others may change at any time, and their owner.
///
/// All access is by copies through raw pointers, and no reference to a byte is created. So threads may share this
/// value: the kernel, Python and other threads may change the bytes at any time, and a copy of changing bytes is
/// unspecified.
#[derive(Clone)]
pub(crate) struct RawMemory {
    start: *mut u8,
    len: usize,
    device: Device,
    /// The stream that accesses are ordered after.
    stream: StreamHandle,
    owner: Owner,
    runs: Option<Arc<Runs>>,
}

// SAFETY: the owner, which is Send, keeps the address valid on every thread.
unsafe impl Send for RawMemory {}
// SAFETY: shared access copies bytes through raw pointers and never returns references.
unsafe impl Sync for RawMemory {}

impl RawMemory {
    pub(crate) fn flat(start: *mut u8, len: usize, device: Device, owner: Owner) -> Self {
        assert!(isize::try_from(len).is_ok(), "a region of {len} bytes is larger than any memory");
        Self { start, len, device, stream: StreamHandle::DEFAULT, owner, runs: None }
    }

    pub(crate) fn strided(start: *mut u8, layout: &Strided, device: Device, owner: Owner) -> Self {
        let runs = Runs::new(layout);
        let len = runs.total_bytes();
        let runs = if runs.is_contiguous() { None } else { Some(Arc::new(runs)) };
        Self { start, len, device, stream: StreamHandle::DEFAULT, owner, runs }
    }

    pub(crate) fn after(self, stream: StreamHandle) -> Self {
        Self { stream, ..self }
    }

    pub(crate) fn stream(&self) -> StreamHandle {
        self.stream
    }

    /// Calls `visit` for each run of equal rows in the logical bytes from `from` on, in order.
    pub(crate) fn visit_rows(&self, from: usize, len: usize, mut visit: impl FnMut(Rows)) {
        let inside = from.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(inside, "{len} bytes at {from} are outside a region of {} bytes", self.len);
        let start = self.addr();
        match &self.runs {
            _ if len == 0 => {}
            None => visit(Rows { address: start.wrapping_add(from), bytes: len, count: 1, pitch: 0 }),
            Some(runs) => runs.for_each_copy(from, len, |offset_bytes, copy| {
                let Copy2d { run_bytes: bytes, columns: Dim { count, stride_bytes: pitch }, rows } = copy;
                for row in 0..rows.count as isize {
                    let address = start.wrapping_add_signed(offset_bytes + row * rows.stride_bytes);
                    visit(Rows { address, bytes, count, pitch });
                }
            }),
        }
    }

    /// Returns the address of the first byte. Its provenance is exposed, since callers turn the address into a pointer
    /// for the kernel.
    pub(crate) fn addr(&self) -> usize {
        self.start.expose_provenance()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn device(&self) -> Device {
        self.device
    }

    pub(crate) fn is_contiguous(&self) -> bool {
        self.runs.is_none()
    }

    pub(crate) fn advise_huge(&self) -> bool {
        let is_flat_host = self.device == Device::Host && self.is_contiguous();
        // SAFETY: the owner keeps the range mapped.
        is_flat_host && unsafe { crate::huge::advise_huge_inside(self.start, self.len) }
    }

    pub(crate) fn slice(&self, range: Range<usize>) -> Self {
        assert!(self.is_contiguous(), "only a contiguous region can be sliced");
        let Range { start, end } = range;
        let inside = start <= end && end <= self.len;
        assert!(inside, "slice {start}..{end} is outside a region of {} bytes", self.len);
        let mut part = self.clone();
        (part.start, part.len) = (self.start.wrapping_add(start), end - start);
        part
    }

    /// Joins with the next bytes if they are adjacent, on the same device, and have the same owner.
    pub(crate) fn join(&self, next: &Self) -> Option<Self> {
        let is_flat = self.is_contiguous() && next.is_contiguous() && self.device == next.device;
        let is_next = self.start.wrapping_add(self.len) == next.start && Arc::ptr_eq(&self.owner, &next.owner);
        (is_flat && is_next).then(|| Self { len: self.len + next.len, ..self.clone() })
    }

    /// Returns a strided view whose first element starts at `at`, or `None` if it is out of bounds.
    pub(crate) fn view(&self, at: usize, layout: &Strided) -> Option<Self> {
        assert!(self.is_contiguous(), "only a contiguous region can be viewed");
        layout.check().ok()?;
        let (below_bytes, above_bytes) = if layout.total_bytes() > 0 { layout.bytes_around_first() } else { (0, 0) };
        let is_inside = at >= below_bytes && at.checked_add(above_bytes)? <= self.len;
        let start = self.start.wrapping_add(at);
        is_inside.then(|| Self::strided(start, layout, self.device, Arc::clone(&self.owner)).after(self.stream))
    }

    /// Replaces the owner. The new one must keep the old one alive.
    pub(crate) fn with_owner(self, owner: Owner) -> Self {
        Self { owner, ..self }
    }

    /// Returns whether no clone of the owner exists, so that nothing else reaches these bytes.
    pub(crate) fn is_unique(&self) -> bool {
        let alone = Arc::strong_count(&self.owner) == 1;
        // Accesses by the last other holder, on any thread, happen before the following ones.
        fence(Ordering::Acquire);
        alone
    }

    /// Returns a reference that dies with the memory.
    #[cfg(test)]
    pub(crate) fn downgrade_owner(&self) -> std::sync::Weak<dyn Any + Send + Sync> {
        Arc::downgrade(&self.owner)
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.start
    }

    /// Returns the owner if it is a `T`, `is_all_of` confirms that it owns exactly these bytes, and nothing else
    /// holds it.
    pub(crate) fn into_owner<T: Any + Send + Sync>(self, is_all_of: impl FnOnce(&T, &Self) -> bool) -> Result<T, Self> {
        if !self.owner.downcast_ref().is_some_and(|owner| is_all_of(owner, &self)) {
            return Err(self);
        }
        let Self { start, len, device, stream, owner, runs } = self;
        let restore = |owner| Self { start, len, device, stream, owner, runs };
        match owner.downcast().map(Arc::<T>::try_unwrap) {
            Ok(Ok(owner)) => Ok(owner),
            Ok(Err(shared)) => Err(restore(shared)),
            Err(other) => Err(restore(other)),
        }
    }

    /// Copies the logical bytes `from..from + len` to `target`.
    ///
    /// # Safety
    /// `target` is valid for writes of `len` bytes.
    pub(crate) unsafe fn copy_out(&self, from: usize, target: *mut u8, len: usize) {
        self.assert_copyable(from, len);
        // SAFETY: the range was checked, and the owner keeps the memory valid. `target` is valid for writes of `len`
        // bytes, as the caller of `copy_out` ensures. Both sides may lie in one pool's arena, so this is `copy`, which
        // costs the same as `copy_nonoverlapping`.
        unsafe {
            match &self.runs {
                None => ptr::copy(self.start.add(from), target, len),
                Some(runs) => runs.gather(self.start, from, target, len),
            }
        }
    }

    /// Copies `len` bytes from `source` over the logical bytes from `to` on.
    ///
    /// # Safety
    /// `source` is valid for reads of `len` bytes, and the memory was created writable.
    pub(crate) unsafe fn copy_in(&self, to: usize, source: *const u8, len: usize) {
        self.assert_copyable(to, len);
        // SAFETY: the range was checked, and the owner keeps the memory valid. `source` is valid for reads of `len`
        // bytes and the memory is writable, as the caller of `copy_in` ensures. Both sides may lie in one pool's arena,
        // so this is `copy`.
        unsafe {
            match &self.runs {
                None => ptr::copy(source, self.start.add(to), len),
                Some(runs) => runs.scatter(self.start, to, source, len),
            }
        }
    }

    /// Copies as [`copy_in`](Self::copy_in) with non-temporal stores. `source` must not overlap this memory.
    ///
    /// # Safety
    /// As [`copy_in`](Self::copy_in).
    pub(crate) unsafe fn copy_in_non_temporal(&self, to: usize, source: &[u8]) {
        self.assert_copyable(to, source.len());
        // SAFETY: the range was checked, the owner keeps the memory valid, and it is writable, as the caller of this
        // function ensures. No reference to this memory is used, so the slice does not overlap it.
        unsafe {
            match &self.runs {
                None => non_temporal::copy(source.as_ptr(), self.start.add(to), source.len()),
                Some(runs) => runs.scatter(self.start, to, source.as_ptr(), source.len()),
            }
        }
    }

    /// Copies all logical bytes of `source` over those from `to` on, past the caches where both are contiguous and do not
    /// overlap.
    ///
    /// # Safety
    /// The memory was created writable.
    pub(crate) unsafe fn copy_region_in(&self, to: usize, source: &Self) {
        self.assert_copyable(to, source.len);
        source.assert_copyable(0, source.len);
        let target = self.start.wrapping_add(to);
        let is_disjoint = source.start.addr().abs_diff(target.addr()) >= source.len;
        if self.runs.is_none() && source.runs.is_none() {
            // SAFETY: both ranges were checked, their owners keep them valid, and this memory is writable, as the caller of
            // `copy_region_in` ensures. `copy` is for ranges that overlap.
            return unsafe {
                if is_disjoint {
                    non_temporal::copy(source.start, target, source.len);
                } else {
                    ptr::copy(source.start, target, source.len);
                }
            };
        }
        let mut step = vec![0; STEP_BYTES.min(source.len)];
        for from in (0..source.len).step_by(STEP_BYTES) {
            let len = STEP_BYTES.min(source.len - from);
            // SAFETY: the buffer has `len` bytes, and this memory is writable, as the caller of `copy_region_in` ensures.
            unsafe {
                source.copy_out(from, step.as_mut_ptr(), len);
                self.copy_in(to + from, step.as_ptr(), len);
            }
        }
    }

    fn assert_copyable(&self, at: usize, len: usize) {
        assert!(self.device == Device::Host, "the CPU cannot copy memory of {:?}", self.device);
        let inside = at.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(inside, "{len} bytes at {at} are outside a region of {} bytes", self.len);
    }
}

impl fmt::Debug for RawMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {:#x} on {:?}", self.len, self.addr(), self.device)?;
        if let Some(runs) = &self.runs { write!(f, ", in {runs:?}") } else { Ok(()) }
    }
}
