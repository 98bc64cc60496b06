//! The flag by which torch refuses to resize a storage.
//!
//! `Tensor.numpy()` clears it for good, and torch has no function to set it again. So its offset is searched once, in
//! storages of our own, and used only if torch's own answer follows it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use pyo3::exceptions::{PyRuntimeError, PyRuntimeWarning};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyDict};

use crate::imported;
use crate::once::intern;

/// Bytes of a storage to search. Every release since 2.4 keeps the flag within them, and more fields behind it.
const SEARCHED_BYTES: usize = 80;

/// Offset of the flag; `None` if it was not found.
static OFFSET: OnceLock<Option<usize>> = OnceLock::new();

/// Returns the offset, if it was searched and found.
pub(super) fn known_offset() -> Option<usize> {
    OFFSET.get().copied().flatten()
}

/// Returns the flag's offset in a storage, searched at the first call. `None`, with a warning, if it is not found.
pub(super) fn offset(py: Python<'_>) -> PyResult<Option<usize>> {
    if let Some(found) = OFFSET.get() {
        return Ok(*found);
    }
    let found = find(py)?;
    if found.is_none() {
        let message =
            c"this release of torch does not show how to keep a storage from being resized: do not resize one \
                        while deepnvme reads into it or writes it";
        PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), message, 1)?;
    }
    Ok(*OFFSET.get_or_init(|| found))
}

/// Returns the flag of a storage. It is atomic because other threads may read it without the GIL.
///
/// # Safety
/// `storage` is the `_cdata` of a torch storage that stays alive for as long as the result is used.
pub(super) unsafe fn of(storage: usize, offset: usize) -> &'static AtomicU8 {
    assert!(offset < SEARCHED_BYTES, "the flag lies within what was searched");
    let byte = std::ptr::with_exposed_provenance_mut::<u8>(storage + offset);
    // SAFETY: the caller's storage is torch's own object, which is larger than the searched bytes, and stays alive.
    unsafe { AtomicU8::from_ptr(byte) }
}

/// Compares storages that torch resizes with one that it does not.
fn find(py: Python<'_>) -> PyResult<Option<usize>> {
    let Some(torch) = imported::module(py, "torch")? else { return Ok(None) };
    let is_resizable =
        |storage: &Bound<'_, PyAny>| storage.call_method0(intern!(py, "resizable")).and_then(|answer| answer.extract());
    let address = |storage: &Bound<'_, PyAny>| storage.getattr(intern!(py, "_cdata")).and_then(|cdata| cdata.extract());
    let class = torch.getattr(intern!(py, "UntypedStorage"))?;
    let free = [class.call1((16,))?, class.call1((4096,))?];
    let bytes = PyByteArray::new(py, &[0; 16]);
    let arguments = PyDict::new(py);
    arguments.set_item("dtype", torch.getattr(intern!(py, "uint8"))?)?;
    let fixed = torch.call_method(intern!(py, "frombuffer"), (bytes,), Some(&arguments))?;
    let fixed = fixed.call_method0(intern!(py, "untyped_storage"))?;
    if !is_resizable(&free[0])? || !is_resizable(&free[1])? || is_resizable(&fixed)? {
        // A wrapper temporarily replaces torch's ordinary storages. Retry later.
        return Err(PyRuntimeError::new_err(
            "torch makes no ordinary storages here (inside FakeTensorMode, for example)",
        ));
    }
    let addresses: [usize; 2] = [address(&free[0])?, address(&free[1])?];
    let fixed: usize = address(&fixed)?;
    for offset in 0..SEARCHED_BYTES {
        // SAFETY: this function holds references to the three storages.
        let (flags, of_fixed) = unsafe { (addresses.map(|storage| of(storage, offset)), of(fixed, offset)) };
        if flags.iter().any(|flag| flag.load(Ordering::Relaxed) != 1) || of_fixed.load(Ordering::Relaxed) != 0 {
            continue;
        }
        flags[0].store(0, Ordering::Relaxed);
        let follows = is_resizable(&free[0]);
        flags[0].store(1, Ordering::Relaxed);
        if !follows? && is_resizable(&free[0])? {
            return Ok(Some(offset));
        }
    }
    Ok(None)
}
