//! Contiguous host memory as slices, for kernels that compute in place.

use std::any::Any;
use std::marker::PhantomData;
use std::sync::Arc;

use deepnvme_mem::{Device, Strided, TensorPlace, first_shared};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use super::layout::{Layout, MemoryAccess};
use super::region::ObjectMemory;

use crate::error::InvalidArgumentError;

/// Numbers that any bytes can be read as.
///
/// # Safety
/// Every bit pattern is valid for the type.
pub(crate) unsafe trait Plain: Copy + Send + Sync + 'static {}

// SAFETY: every bit pattern is an integer.
unsafe impl Plain for u8 {}
// SAFETY: every bit pattern is an integer.
unsafe impl Plain for u16 {}
// SAFETY: every bit pattern is a float, perhaps a NaN.
unsafe impl Plain for f32 {}

/// An object's elements, and the reference that keeps them in place.
pub(crate) struct TensorSlice<T> {
    address: usize,
    len: usize,
    access: MemoryAccess,
    keep: Arc<dyn Any + Send + Sync>,
    elements: PhantomData<T>,
}

/// Address range of a slice, for [`check_disjoint`].
pub(crate) struct AddressRange {
    start: usize,
    end: usize,
    is_written: bool,
}

impl AddressRange {
    /// Describes memory that will be written to.
    pub(crate) fn written(start: usize, bytes: usize) -> Self {
        Self { start, end: start + bytes, is_written: true }
    }
}

impl<T: Plain> TensorSlice<T> {
    /// Borrows the elements of a contiguous host tensor. Its bytes are read as `T`, whatever its dtype.
    pub(crate) fn new(memory: ObjectMemory, access: MemoryAccess) -> PyResult<Self> {
        let ObjectMemory::Layout(Layout { device_stream, address, bytes, strided, keep }) = memory else {
            return Err(PyTypeError::new_err("this tensor is another library's; pass a torch tensor or a numpy array"));
        };
        if device_stream.device != Device::Host {
            return Err(InvalidArgumentError::new_err("this tensor is on a GPU; pass a tensor on the CPU"));
        }
        if strided.is_some() {
            return Err(InvalidArgumentError::new_err("this tensor is not contiguous; pass tensor.contiguous()"));
        }
        if !bytes.is_multiple_of(size_of::<T>()) || (bytes > 0 && !address.is_multiple_of(align_of::<T>())) {
            let wanted = size_of::<T>();
            return Err(InvalidArgumentError::new_err(format!(
                "{bytes} bytes at address {address:#x} are not whole, aligned elements of {wanted} bytes; pass tensor.clone()"
            )));
        }
        Ok(Self { address, len: bytes / size_of::<T>(), access, keep: Arc::new(keep), elements: PhantomData })
    }

    /// Borrow elements at an address. `None` if it is not aligned.
    ///
    /// # Safety
    /// `keep` keeps the memory of these elements in place. With [`MemoryAccess::Write`], they may change.
    pub(super) unsafe fn kept(
        address: usize,
        len: usize,
        access: MemoryAccess,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Option<Self> {
        let is_aligned = len == 0 || address.is_multiple_of(align_of::<T>());
        is_aligned.then_some(Self { address, len, access, keep, elements: PhantomData })
    }

    /// Return the number of elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Borrow the elements from `begin` to `end` a second time. Call [`check_disjoint`] with the slices that are used.
    /// `None` if there are fewer.
    pub(crate) fn part(&self, begin: usize, end: usize) -> Option<Self> {
        let is_inside = begin <= end && end <= self.len;
        let address = self.address + begin * size_of::<T>();
        if !is_inside {
            return None;
        }
        // SAFETY: `keep` keeps the memory of this slice in place, and the part is inside.
        unsafe { Self::kept(address, end - begin, self.access, Arc::clone(&self.keep)) }
    }

    /// Borrow `len` elements of another type from a byte on. `None` if they are not inside, or not aligned.
    pub(crate) fn cast_part<U: Plain>(&self, byte: usize, len: usize) -> Option<TensorSlice<U>> {
        let end = len.checked_mul(size_of::<U>())?.checked_add(byte)?;
        let is_inside = end <= self.len * size_of::<T>();
        if !is_inside {
            return None;
        }
        // SAFETY: `keep` keeps the memory of this slice in place, and the part is inside.
        unsafe { TensorSlice::kept(self.address + byte, len, self.access, Arc::clone(&self.keep)) }
    }

    pub(crate) fn address_range(&self) -> AddressRange {
        let end = self.address + self.len * size_of::<T>();
        AddressRange { start: self.address, end, is_written: self.access == MemoryAccess::Write }
    }

    /// Returns the elements.
    ///
    /// # Safety
    /// No other slice of the same work changes them, as [`check_disjoint`] of all these slices shows.
    pub(crate) unsafe fn as_slice(&self) -> &[T] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the object stated its address, and `keep` keeps the bytes there. They are aligned and whole, and any
        // bits are valid. No other slice of the same work changes them. The Python program must not change a tensor in
        // another thread while a kernel reads it, as for torch's kernels.
        unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(self.address), self.len) }
    }

    /// Returns the elements for writing. The slice must be created with [`MemoryAccess::Write`].
    ///
    /// # Safety
    /// No other slice of the same work overlaps them, as [`check_disjoint`] of all these slices shows.
    pub(crate) unsafe fn as_mut_slice(&mut self) -> &mut [T] {
        assert!(self.access == MemoryAccess::Write, "this slice is for reading");
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: the object stated its address and that its bytes may change, and `keep` keeps them there. They are
        // aligned and whole, and any bits are valid. No other slice of the same work overlaps them. The Python program
        // must not use a tensor in another thread while a kernel changes it, as for torch's kernels.
        unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(self.address), self.len) }
    }
}

/// Refuses arguments that overlap memory which another argument changes.
pub(crate) fn check_disjoint(mut address_ranges: Vec<AddressRange>) -> PyResult<()> {
    address_ranges.retain(|address_range| address_range.start < address_range.end);
    address_ranges.sort_unstable_by_key(|address_range| address_range.start);
    let (mut end, mut end_of_writes) = (0, 0);
    for address_range in address_ranges {
        if address_range.start < end_of_writes || (address_range.is_written && address_range.start < end) {
            return Err(shared());
        }
        end = end.max(address_range.end);
        if address_range.is_written {
            end_of_writes = end_of_writes.max(address_range.end);
        }
    }
    Ok(())
}

/// Refuses strided arguments that share memory with each other or with contiguous ones. They may lie between the
/// elements of each other.
pub(crate) fn check_disjoint_from(contiguous: &[AddressRange], mut strided: Vec<TensorPlace>) -> PyResult<()> {
    if strided.is_empty() {
        return Ok(());
    }
    for &AddressRange { start, end, .. } in contiguous {
        strided.push(TensorPlace { address: start, layout: Strided::contiguous(vec![end - start], 1)? });
    }
    first_shared(&strided).map_or(Ok(()), |_| Err(shared()))
}

fn shared() -> PyErr {
    InvalidArgumentError::new_err(
        "two of the tensors share memory, and one of them would be changed; pass tensors of their own",
    )
}
