//! What is asked of the interpreter itself.

use std::ffi::{c_int, c_void};
use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;

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
