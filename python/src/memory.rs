//! The bytes of Python objects as the engine's regions: the one file of the binding with unsafe code.
//!
//! `torch` and `array` ask an object where its bytes lie, in plain attribute calls; here those answers become
//! addresses. Every region owns a Python reference that keeps its bytes alive: of a tensor its storage, of a numpy
//! array the array, of anything else an exported buffer or a DLPack capsule. The engine may let go of that
//! reference on a thread of its own; PyO3 then keeps it until a thread that holds the GIL comes by.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::Arc;

use deepnvme_mem::dlpack::{self as dl, DLDataType, DLDevice, DLTensor, ExchangeApi, Imported, Managed};
use deepnvme_mem::{Device, Region, RegionMut, Strided};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyCapsule, PyMemoryView};

use crate::{array, dlpack, torch};

/// What a request does with the memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Use {
    /// A read fills it.
    Fill,
    /// A write takes its bytes.
    Take,
}

/// Where an object's bytes lie, and what keeps them there.
pub(crate) struct Layout {
    pub(crate) address: usize,
    pub(crate) bytes: usize,
    /// `None` where they lie side by side.
    pub(crate) strided: Option<Strided>,
    pub(crate) keep: Py<PyAny>,
}

/// The memory that a write takes its bytes from.
pub(crate) fn source(object: &Bound<'_, PyAny>) -> PyResult<Region> {
    let layout = match find(object, Use::Take)? {
        Found::Imported(tensor) => return tensor.into_region().map_err(refusal),
        Found::Layout(layout) => layout,
    };
    let (start, owner) = (ptr::with_exposed_provenance_mut(layout.address), Arc::new(layout.keep));
    Ok(match layout.strided {
        // SAFETY: the object said where its bytes are, and the owner is the reference that keeps them there.
        None => unsafe { Region::from_raw(start, layout.bytes, Device::Host, owner) },
        // SAFETY: as above, for a layout that was checked.
        Some(strided) => unsafe { Region::from_strided(start, strided, Device::Host, owner) },
    })
}

/// The memory that a read fills.
pub(crate) fn target(object: &Bound<'_, PyAny>) -> PyResult<RegionMut> {
    let layout = match find(object, Use::Fill)? {
        Found::Imported(tensor) => {
            check_overlap(Some(tensor.layout()))?;
            return tensor.into_region_mut().map_err(refusal);
        }
        Found::Layout(layout) => layout,
    };
    check_overlap(layout.strided.as_ref())?;
    let (start, owner) = (ptr::with_exposed_provenance_mut(layout.address), Arc::new(layout.keep));
    Ok(match layout.strided {
        // SAFETY: the object said where its bytes are and that they may change, the owner keeps them there, and
        // no Rust reference to them exists while Python code can reach them.
        None => unsafe { RegionMut::from_raw(start, layout.bytes, Device::Host, owner) },
        // SAFETY: as above, for a layout that was checked and has each byte once.
        Some(strided) => unsafe { RegionMut::from_strided(start, strided, Device::Host, owner) },
    })
}

enum Found {
    Layout(Layout),
    Imported(Imported),
}

fn find(object: &Bound<'_, PyAny>, usage: Use) -> PyResult<Found> {
    let layout = if let Some(layout) = torch::layout(object, usage)? {
        layout
    } else if let Some(layout) = array::layout(object, usage)? {
        layout
    } else if let Ok(view) = PyMemoryView::from(object) {
        array::from_view(object, &exported(&view)?, view.into_any(), usage)?
    } else if let Some(tensor) = dlpack::tensor(object, usage)? {
        return Ok(Found::Imported(tensor));
    } else {
        return Err(PyTypeError::new_err(format!(
            "tensor must be a torch tensor, a numpy array, or an object with the buffer protocol or DLPack, not {}",
            object.get_type().name()?
        )));
    };
    layout.strided.as_ref().map_or(Ok(()), Strided::check).map_err(refusal)?;
    Ok(Found::Layout(layout))
}

fn check_overlap(strided: Option<&Strided>) -> PyResult<()> {
    if !strided.is_some_and(Strided::may_overlap) {
        return Ok(());
    }
    Err(PyValueError::new_err(
        "several elements of this tensor share their memory (expand() and as_strided() make such tensors), so that a \
         read has no place of its own for each; read into a tensor of its own, such as tensor.contiguous()",
    ))
}

#[expect(clippy::needless_pass_by_value, reason = "so that `map_err` takes it by name")]
fn refusal(error: std::io::Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}

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
fn exported(view: &Bound<'_, PyMemoryView>) -> PyResult<Exported> {
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

/// The functions by which a type's tensors can be looked at without calling Python, if it has them.
pub(crate) fn exchange_api(class: &Bound<'_, PyAny>) -> Option<&'static ExchangeApi> {
    let capsule = class.getattr("__dlpack_c_exchange_api__").ok()?.cast_into::<PyCapsule>().ok()?;
    let pointer = capsule.pointer_checked(Some(ExchangeApi::CAPSULE_NAME)).ok()?;
    // SAFETY: the capsule has the name that DLPack gives such a table, which lives as long as the process.
    unsafe { ExchangeApi::from_capsule(pointer) }
}

/// Address and bytes of a plain tensor: contiguous, real and in host memory. `None` for every other, which has to
/// be asked in Python what it is. The object must be of the type that the functions were found at.
pub(crate) fn glance(api: &ExchangeApi, object: &Bound<'_, PyAny>) -> Option<(usize, usize)> {
    let pointer = ptr::NonNull::new(object.as_ptr().cast::<c_void>())?;
    // SAFETY: the object is alive, of that type by the caller's word, and the GIL is held.
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
        // SAFETY: both have `ndim` entries, which nobody changes while the GIL is held.
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
    (!data.is_null() || bytes == 0).then_some((address, bytes))
}

/// Keeps Python's cycle collector from running. What keeps ten thousand tensors in place are ten thousand new objects,
/// none of them garbage, and looking for some among them, and then in all of the process, takes longer than making
/// them.
pub(crate) struct Uncollected {
    was_enabled: bool,
}

impl Uncollected {
    pub(crate) fn new(_: Python<'_>) -> Self {
        // SAFETY: the GIL is held, which the token proves.
        Self { was_enabled: unsafe { ffi::PyGC_Disable() } != 0 }
    }
}

impl Drop for Uncollected {
    fn drop(&mut self) {
        if self.was_enabled {
            // SAFETY: the guard never leaves the function that made it, which holds the GIL.
            unsafe { ffi::PyGC_Enable() };
        }
    }
}

/// Has the interpreter's main thread call a function soon. May be called by any thread, which need not hold the GIL, and
/// never waits. Not to be called when the interpreter is gone.
pub(crate) fn call_soon(function: extern "C" fn(*mut c_void) -> c_int) {
    // SAFETY: the function takes the null pointer, and CPython lets any thread call this. When too many calls are
    // waiting it says no, and the caller asks again some time.
    let _ = unsafe { ffi::Py_AddPendingCall(Some(function), ptr::null_mut()) };
}

/// Whether a capsule has that name, which says what it holds.
pub(crate) fn has_name(capsule: &Bound<'_, PyCapsule>, name: &CStr) -> bool {
    capsule.is_valid_checked(Some(name))
}

/// Takes the DLPack tensor out of a capsule, so that its deleter is called when the last region of it is dropped.
pub(crate) fn take<M: Managed>(capsule: &Bound<'_, PyCapsule>) -> PyResult<Imported> {
    let managed = capsule.pointer_checked(Some(M::CAPSULE_NAME))?;
    // SAFETY: a capsule of that name holds such a tensor, which nobody has taken, by DLPack's protocol.
    let imported = unsafe { dl::import(managed.as_ptr().cast::<M>()) }.map_err(refusal)?;
    // SAFETY: the capsule is valid, and the name is a constant. Renamed, it leaves the tensor alone when it dies.
    if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), M::USED_CAPSULE_NAME.as_ptr()) } != 0 {
        // Nobody must free the tensor twice: rather nobody does.
        std::mem::forget(imported);
        return Err(PyErr::fetch(capsule.py()));
    }
    Ok(imported)
}

/// A capsule that hands a tensor of ours to whoever takes it, and frees it if nobody does.
pub(crate) fn capsule<M: Managed>(py: Python<'_>, tensor: dl::Exported<M>) -> PyResult<Bound<'_, PyCapsule>> {
    /// # Safety
    /// For CPython to call, with a capsule that `capsule` made.
    unsafe extern "C" fn free_untaken<M: Managed>(capsule: *mut ffi::PyObject) {
        // SAFETY: CPython calls this once, with a capsule that `capsule` made. One that was taken has another name.
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
    // SAFETY: the pointer is not null, the name is a constant, and the destructor is made for this capsule.
    unsafe {
        let made = ffi::PyCapsule_New(managed.as_ptr().cast(), M::CAPSULE_NAME.as_ptr(), Some(free_untaken::<M>));
        if made.is_null() {
            dl::release(managed);
        }
        Ok(Bound::from_owned_ptr_or_err(py, made)?.cast_into_unchecked())
    }
}

/// The descriptor of that number, which the caller has promised to be open.
pub(crate) fn borrow_descriptor(number: i32) -> BorrowedFd<'static> {
    assert!(number >= 0, "a file descriptor is not negative");
    // SAFETY: the kernel checks the number at each use and answers EBADF where it is not open; the engine
    // duplicates it before it keeps anything.
    unsafe { BorrowedFd::borrow_raw(number) }
}
