//! Exchange DLPack structs with Python: in capsules, and through the table of C functions.

use std::ffi::{CStr, c_void};
use std::ptr;

use deepnvme_mem::dlpack::{self as dl, DLDataType, DLDevice, DLTensor, ExchangeApi, Imported, Managed};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use super::layout::refusal;

/// Returns the type's C functions for describing tensors without calling Python, if it exports them.
pub(crate) fn exchange_api(class: &Bound<'_, PyAny>) -> Option<&'static ExchangeApi> {
    let capsule = class.getattr("__dlpack_c_exchange_api__").ok()?.cast_into::<PyCapsule>().ok()?;
    let pointer = capsule.pointer_checked(Some(ExchangeApi::CAPSULE_NAME)).ok()?;
    // SAFETY: the capsule has DLPack's name for such a table, which lives as long as the process.
    unsafe { ExchangeApi::from_capsule(pointer) }
}

/// The address, size, element type and shape of a plain tensor.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct PlainTensor {
    pub(crate) address: usize,
    pub(crate) bytes: usize,
    pub(crate) dtype: DLDataType,
    pub(crate) shape: Vec<u64>,
}

/// Describes a plain tensor: contiguous, real and in host memory. `None` for all others, which must be examined in
/// Python. The object must be of the type that exported the functions.
pub(crate) fn try_describe(api: &ExchangeApi, object: &Bound<'_, PyAny>) -> Option<PlainTensor> {
    let pointer = ptr::NonNull::new(object.as_ptr().cast::<c_void>())?;
    // SAFETY: `object` is a live reference, and holding it means to hold the GIL. Its type exported `api`:
    // `torch::describe_plain` lets only torch's own two classes pass.
    let Some(tensor) = (unsafe { api.describe(pointer) }) else {
        drop(PyErr::take(object.py()));
        return None;
    };
    let DLTensor { data, device, ndim, dtype, shape, strides, byte_offset } = tensor;
    let item_bytes = dtype.item_bytes()?;
    if device.device_type != DLDevice::CPU || dtype.code == DLDataType::COMPLEX {
        return None;
    }
    let dims = usize::try_from(ndim).ok()?;
    let extents = |start: *const i64| -> Option<&[i64]> {
        // SAFETY: both contain `ndim` entries, which do not change while the GIL is held.
        (!start.is_null()).then(|| unsafe { std::slice::from_raw_parts(start, dims) })
    };
    let shape = if dims == 0 { &[] } else { extents(shape)? };
    let mut count = 1_usize;
    let strides = if dims == 0 { None } else { extents(strides) };
    for dim in (0..dims).rev() {
        let extent = usize::try_from(shape[dim]).ok()?;
        if extent > 1 && strides.is_some_and(|strides| usize::try_from(strides[dim]) != Ok(count)) {
            return None;
        }
        count = count.checked_mul(extent)?;
    }
    let bytes = count.checked_mul(item_bytes)?;
    let address = data.expose_provenance().checked_add(usize::try_from(byte_offset).ok()?)?;
    let shape = shape.iter().map(|extent| *extent as u64).collect();
    (!data.is_null() || bytes == 0).then_some(PlainTensor { address, bytes, dtype, shape })
}

/// Returns whether a capsule has this name, which states its type.
pub(crate) fn has_name(capsule: &Bound<'_, PyCapsule>, name: &CStr) -> bool {
    capsule.is_valid_checked(Some(name))
}

/// Takes the DLPack tensor out of a capsule. Its deleter runs when the last region of it is dropped.
pub(crate) fn take<M: Managed>(capsule: &Bound<'_, PyCapsule>) -> PyResult<Imported> {
    let managed = capsule.pointer_checked(Some(M::CAPSULE_NAME))?;
    // SAFETY: by DLPack's protocol, a capsule of this name holds a tensor that was not taken.
    let imported = unsafe { dl::import(managed.as_ptr().cast::<M>()) }.map_err(refusal)?;
    // SAFETY: the capsule is valid, and the name is a constant. Once renamed, it does not free the tensor.
    if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), M::USED_CAPSULE_NAME.as_ptr()) } != 0 {
        // The tensor must not be freed twice: leak it instead.
        std::mem::forget(imported);
        return Err(PyErr::fetch(capsule.py()));
    }
    Ok(imported)
}

/// Wraps our tensor in a capsule. The consumer takes the tensor; otherwise the capsule frees it.
pub(crate) fn capsule<M: Managed>(py: Python<'_>, tensor: dl::Exported<M>) -> PyResult<Bound<'_, PyCapsule>> {
    /// # Safety
    /// CPython calls it, with a capsule that `capsule` made.
    unsafe extern "C" fn free_untaken<M: Managed>(capsule: *mut ffi::PyObject) {
        // SAFETY: CPython calls this once, with a capsule that `capsule` made. A consumer renames the capsules that it
        // takes.
        unsafe {
            if ffi::PyCapsule_IsValid(capsule, M::CAPSULE_NAME.as_ptr()) == 0 {
                return;
            }
            let managed = ffi::PyCapsule_GetPointer(capsule, M::CAPSULE_NAME.as_ptr());
            if let Some(managed) = ptr::NonNull::new(managed.cast::<M>()) {
                dl::release(managed);
            }
        }
    }
    let managed = tensor.into_raw();
    // SAFETY: the pointer is not null, the name is a constant, and the destructor matches this capsule.
    unsafe {
        let made = ffi::PyCapsule_New(managed.as_ptr().cast(), M::CAPSULE_NAME.as_ptr(), Some(free_untaken::<M>));
        if made.is_null() {
            dl::release(managed);
        }
        Ok(Bound::from_owned_ptr_or_err(py, made)?.cast_into_unchecked())
    }
}
