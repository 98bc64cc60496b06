//! The buffer protocol, and numpy's array struct: what exporters say about their memory.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use deepnvme_mem::{Device, RegionMut};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyCapsule, PyMemoryView};

/// What an exporter says about its memory.
pub(crate) struct Exported {
    pub(crate) address: usize,
    pub(crate) bytes: usize,
    pub(crate) item_bytes: usize,
    pub(crate) shape: Vec<usize>,
    /// `None` where the bytes lie side by side.
    pub(crate) stride_bytes: Option<Vec<isize>>,
    pub(crate) readonly: bool,
    /// The elements are references to Python objects.
    pub(crate) holds_objects: bool,
    /// The elements are reached through pointers (PIL-style arrays of rows).
    pub(crate) indirect: bool,
}

/// `Py_buffer`. It is in the stable ABI from Python 3.11 on; Python 3.10 exports the same functions and lays
/// it out the same way, without promising to. There will be no other 3.10.
#[repr(C)]
struct RawBuffer {
    buf: *mut c_void,
    obj: *mut ffi::PyObject,
    len: ffi::Py_ssize_t,
    itemsize: ffi::Py_ssize_t,
    readonly: c_int,
    ndim: c_int,
    format: *const c_char,
    shape: *const ffi::Py_ssize_t,
    strides: *const ffi::Py_ssize_t,
    suboffsets: *const ffi::Py_ssize_t,
    internal: *mut c_void,
}

/// Everything that an exporter can say, read-only memory included: `PyBUF_FULL_RO`.
const FULL_RO: c_int = 0x0100 | 0x0018 | 0x0004;

// SAFETY: the signatures are those of CPython's headers.
unsafe extern "C" {
    fn PyObject_GetBuffer(object: *mut ffi::PyObject, view: *mut RawBuffer, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut RawBuffer);
}

/// What a memory view shows. The memory stays exported, and in place, for as long as the view is alive.
pub(super) fn exported(view: &Bound<'_, PyMemoryView>) -> PyResult<Exported> {
    // SAFETY: an all-zero struct of pointers and integers is a valid value, and the one that CPython starts from.
    let mut raw: RawBuffer = unsafe { std::mem::zeroed() };
    // SAFETY: both are valid for the call, and the GIL is held.
    if unsafe { PyObject_GetBuffer(view.as_ptr(), &raw mut raw, FULL_RO) } != 0 {
        return Err(PyErr::fetch(view.py()));
    }
    let dims = raw.ndim.max(0) as usize;
    // SAFETY: a full view has `ndim` entries in shape and strides, and a format that ends in a zero byte; each
    // may be null where it says nothing.
    let (shape, strides, format) = unsafe {
        let shape = if raw.shape.is_null() { &[][..] } else { std::slice::from_raw_parts(raw.shape, dims) };
        let strides = (!raw.strides.is_null()).then(|| std::slice::from_raw_parts(raw.strides, dims));
        let format = if raw.format.is_null() { c"B" } else { CStr::from_ptr(raw.format) };
        (shape, strides, format)
    };
    let shape: Vec<usize> = shape.iter().map(|count| *count as usize).collect();
    let item_bytes = raw.itemsize.max(0) as usize;
    let exported = Exported {
        address: raw.buf.expose_provenance(),
        bytes: raw.len.max(0) as usize,
        item_bytes,
        stride_bytes: strides.filter(|strides| !is_row_major(&shape, strides, item_bytes)).map(<[isize]>::to_vec),
        shape,
        readonly: raw.readonly != 0,
        holds_objects: format.to_bytes().contains(&b'O'),
        indirect: !raw.suboffsets.is_null(),
    };
    // SAFETY: it was filled above, and is released once. The memory view holds the export that keeps the memory.
    unsafe { PyBuffer_Release(&raw mut raw) };
    Ok(exported)
}

/// Whether those strides are what a contiguous array of that shape has.
pub(crate) fn is_row_major(shape: &[usize], stride_bytes: &[isize], item_bytes: usize) -> bool {
    let mut expected = item_bytes;
    for (count, stride) in shape.iter().zip(stride_bytes).rev() {
        if *count == 0 {
            return true;
        }
        if *count > 1 && *stride != expected as isize {
            return false;
        }
        expected = expected.saturating_mul(*count);
    }
    true
}

/// numpy's `PyArrayInterface`, which every array hands out in `__array_struct__`.
#[repr(C)]
struct RawArray {
    two: c_int,
    nd: c_int,
    typekind: c_char,
    itemsize: c_int,
    flags: c_int,
    shape: *const isize,
    strides: *const isize,
    data: *mut c_void,
    descr: *mut ffi::PyObject,
}

/// What an `__array_struct__` capsule says. Its flags are left alone: numpy clears them all for structured types.
pub(crate) fn array_struct(capsule: &Bound<'_, PyCapsule>, readonly: bool) -> PyResult<Exported> {
    let raw = capsule.pointer_checked(None)?.cast::<RawArray>();
    // SAFETY: a capsule without a name that `__array_struct__` returned holds this struct, by numpy's protocol.
    let raw = unsafe { raw.as_ref() };
    if raw.two != 2 {
        return Err(PyTypeError::new_err("this array's __array_struct__ is of another version than 2"));
    }
    let dims = raw.nd.max(0) as usize;
    // SAFETY: shape and strides have `nd` entries each, and are not looked at where that is none.
    let (shape, strides) = unsafe {
        match dims {
            0 => (&[][..], &[][..]),
            _ => (std::slice::from_raw_parts(raw.shape, dims), std::slice::from_raw_parts(raw.strides, dims)),
        }
    };
    let shape: Vec<usize> = shape.iter().map(|count| *count as usize).collect();
    let item_bytes = raw.itemsize.max(0) as usize;
    Ok(Exported {
        address: raw.data.expose_provenance(),
        bytes: shape.iter().fold(item_bytes, |bytes, count| bytes.saturating_mul(*count)),
        item_bytes,
        stride_bytes: (!is_row_major(&shape, strides, item_bytes)).then(|| strides.to_vec()),
        shape,
        readonly,
        holds_objects: false,
        indirect: false,
    })
}

/// Whether an object has the buffer protocol.
pub(crate) fn is_buffer(object: &Bound<'_, PyAny>) -> bool {
    object.is_instance_of::<PyBytes>() || PyMemoryView::from(object).is_ok()
}

/// Calls `use_it` with the bytes of an object that exports a contiguous buffer.
pub(crate) fn with_bytes<T>(object: &Bound<'_, PyAny>, use_it: impl FnOnce(&[u8]) -> PyResult<T>) -> PyResult<T> {
    if let Ok(bytes) = object.cast::<PyBytes>() {
        return use_it(bytes.as_bytes());
    }
    let view = PyMemoryView::from(object)?;
    let memory = exported(&view)?;
    if memory.stride_bytes.is_some() || memory.indirect {
        return Err(PyValueError::new_err("the bytes of this buffer do not lie side by side; pass a contiguous copy"));
    }
    if memory.bytes == 0 {
        return use_it(&[]);
    }
    let start: *const u8 = ptr::with_exposed_provenance(memory.address);
    // SAFETY: the view keeps the memory exported, so that it can be neither freed nor moved before this returns.
    // Another thread may change the bytes meanwhile, as with any file that Python writes with the GIL released.
    use_it(unsafe { std::slice::from_raw_parts(start, memory.bytes) })
}

/// A new `bytes` object, and its memory, to be filled before anybody else sees it. Clearing it first would take
/// as long as reading it from a fast disk.
pub(crate) fn new_bytes(py: Python<'_>, len: usize) -> PyResult<(Bound<'_, PyBytes>, RegionMut)> {
    let length = ffi::Py_ssize_t::try_from(len)?;
    // SAFETY: without a source CPython leaves the bytes as they are, for the caller to fill.
    let bytes = unsafe {
        let made = ffi::PyBytes_FromStringAndSize(ptr::null(), length);
        Bound::from_owned_ptr_or_err(py, made)?.cast_into_unchecked::<PyBytes>()
    };
    // SAFETY: the object is a `bytes`.
    let start = unsafe { ffi::PyBytes_AsString(bytes.as_ptr()) };
    let owner = Arc::new(bytes.clone().unbind());
    // SAFETY: the memory is the object's own, which the owner keeps, and only the caller has a reference to it. Until
    // it is filled it is only written to; where that fails, the object goes unseen.
    let region = unsafe { RegionMut::from_raw(start.cast(), len, Device::Host, owner) };
    Ok((bytes, region))
}
