//! The buffer protocol and numpy's array struct: memory as exporters describe it.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use deepnvme_mem::{Device, RegionMut};
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyCapsule, PyMemoryView};

use super::held_storages::KeepAlive;

use crate::error::InvalidArgumentError;

/// An exporter's description of its memory.
pub(crate) struct Exported {
    pub(crate) address: usize,
    pub(crate) bytes: usize,
    pub(crate) item_bytes: usize,
    pub(crate) shape: Vec<usize>,
    /// `None` if the memory is contiguous.
    pub(crate) stride_bytes: Option<Vec<isize>>,
    pub(crate) readonly: bool,
    /// The elements are references to Python objects.
    pub(crate) holds_objects: bool,
    /// The elements are reached through pointers (PIL-style arrays of rows).
    pub(crate) indirect: bool,
}

/// `Py_buffer`. It is in the stable ABI from Python 3.11 on. Python 3.10 exports the same functions and layout without
/// promising them, but no later 3.10 will change them.
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

/// Request all that an exporter can describe, including read-only memory: `PyBUF_FULL_RO`.
const FULL_RO: c_int = 0x0100 | 0x0018 | 0x0004;

// SAFETY: the signatures match CPython's headers.
unsafe extern "C" {
    fn PyObject_GetBuffer(object: *mut ffi::PyObject, view: *mut RawBuffer, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut RawBuffer);
}

/// Describes the memory of a memory view. The memory stays exported, and in place, while the view is alive.
pub(crate) fn exported(view: &Bound<'_, PyMemoryView>) -> PyResult<Exported> {
    // SAFETY: an all-zero struct of pointers and integers is valid, and CPython starts from one.
    let mut raw: RawBuffer = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are valid for the call, and the GIL is held.
    if unsafe { PyObject_GetBuffer(view.as_ptr(), &raw mut raw, FULL_RO) } != 0 {
        return Err(PyErr::fetch(view.py()));
    }
    let dims = raw.ndim.max(0) as usize;
    // SAFETY: CPython fills `ndim` entries of shape and strides, and a zero-terminated format. Each may be null.
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
    // SAFETY: it was filled above and is released once. The memory view keeps the memory exported.
    unsafe { PyBuffer_Release(&raw mut raw) };
    Ok(exported)
}

/// Returns whether the strides are those of a contiguous array of this shape.
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

/// numpy's `PyArrayInterface`, which arrays return from `__array_struct__`.
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

/// Reads an `__array_struct__` capsule. Its flags are ignored: numpy clears them all for structured types.
pub(crate) fn array_struct(capsule: &Bound<'_, PyCapsule>, readonly: bool) -> PyResult<Exported> {
    let raw = capsule.pointer_checked(None)?.cast::<RawArray>();
    // SAFETY: by numpy's protocol, an unnamed capsule from `__array_struct__` holds this struct.
    let raw = unsafe { raw.as_ref() };
    if raw.two != 2 {
        return Err(PyTypeError::new_err("this array's __array_struct__ is of another version than 2"));
    }
    let dims = raw.nd.max(0) as usize;
    // SAFETY: numpy fills `nd` entries of shape and strides. They are not read if `nd` is zero.
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

/// Returns whether an object supports the buffer protocol.
pub(crate) fn is_buffer(object: &Bound<'_, PyAny>) -> bool {
    object.is_instance_of::<PyBytes>() || PyMemoryView::from(object).is_ok()
}

/// Calls `use_it` with the bytes of a contiguous buffer.
pub(crate) fn with_bytes<T>(object: &Bound<'_, PyAny>, use_it: impl FnOnce(&[u8]) -> PyResult<T>) -> PyResult<T> {
    if let Ok(bytes) = object.cast::<PyBytes>() {
        return use_it(bytes.as_bytes());
    }
    let view = PyMemoryView::from(object)?;
    let memory = exported(&view)?;
    if memory.stride_bytes.is_some() || memory.indirect {
        return Err(InvalidArgumentError::new_err(
            "the bytes of this buffer do not lie side by side; pass a contiguous copy",
        ));
    }
    if memory.bytes == 0 {
        return use_it(&[]);
    }
    let start: *const u8 = ptr::with_exposed_provenance(memory.address);
    // SAFETY: the view keeps the memory exported until this returns, so it is neither freed nor moved. The Python
    // program must not change the bytes meanwhile, as in a `write` of Python's own files: this code cannot prevent it.
    use_it(unsafe { std::slice::from_raw_parts(start, memory.bytes) })
}

/// Creates a `bytes` object and returns its memory, to be filled before any other reference exists. Clearing it first
/// would take as long as reading it from a fast disk.
pub(crate) fn new_bytes(py: Python<'_>, len: usize) -> PyResult<(Bound<'_, PyBytes>, RegionMut)> {
    let length = ffi::Py_ssize_t::try_from(len)?;
    // SAFETY: without a source, CPython leaves the bytes uninitialised for the caller to fill.
    let bytes = unsafe {
        let made = ffi::PyBytes_FromStringAndSize(ptr::null(), length);
        Bound::from_owned_ptr_or_err(py, made)?.cast_into_unchecked::<PyBytes>()
    };
    // SAFETY: the object is a `bytes`.
    let start = unsafe { ffi::PyBytes_AsString(bytes.as_ptr()) };
    let owner = Arc::new(KeepAlive::object(bytes.clone().unbind().into_any()));
    // SAFETY: the memory belongs to the object, which the owner keeps alive, and only the caller references it. Until
    // it is filled it is only written to. If that fails, the object is dropped unread.
    let region = unsafe { RegionMut::from_raw(start.cast(), len, Device::Host, owner) };
    Ok((bytes, region))
}
