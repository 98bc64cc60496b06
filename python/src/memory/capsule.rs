//! Exchange DLPack structs with Python: in capsules, and through the table of C functions.

use std::ffi::CStr;
use std::ptr;

use deepnvme_mem::dlpack::{self as dl, ExchangeApi, Imported, Managed};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use super::layout::to_value_error;

/// Returns the type's C functions for describing tensors without calling Python, if it exports them.
pub(crate) fn exchange_api(class: &Bound<'_, PyAny>) -> Option<&'static ExchangeApi> {
    let capsule = class.getattr("__dlpack_c_exchange_api__").ok()?.cast_into::<PyCapsule>().ok()?;
    let pointer = capsule.pointer_checked(Some(ExchangeApi::CAPSULE_NAME)).ok()?;
    // SAFETY: the capsule has DLPack's name for such a table, which lives as long as the process.
    unsafe { ExchangeApi::from_capsule(pointer) }
}

/// Returns whether a capsule has this name, which states its type.
pub(crate) fn has_name(capsule: &Bound<'_, PyCapsule>, name: &CStr) -> bool {
    capsule.is_valid_checked(Some(name))
}

/// Takes the DLPack tensor out of a capsule. Its deleter runs when the last region of it is dropped.
pub(crate) fn take<M: Managed>(capsule: &Bound<'_, PyCapsule>) -> PyResult<Imported> {
    let managed = capsule.pointer_checked(Some(M::CAPSULE_NAME))?;
    // SAFETY: by DLPack's protocol, a capsule of this name holds a tensor that was not taken.
    let imported = unsafe { dl::import(managed.as_ptr().cast::<M>()) }.map_err(to_value_error)?;
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
