//! Calls to the interpreter itself.

use std::ffi::{c_int, c_void};
use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;

/// Keep Python's cycle collector from running. Keeping ten thousand tensors in place takes ten thousand new objects,
/// none of them garbage. Collecting among them, and then in the whole process, takes longer than creating them.
pub(crate) struct GcPause {
    was_enabled: bool,
}

impl GcPause {
    pub(crate) fn new(_: Python<'_>) -> Self {
        // SAFETY: the token proves that the GIL is held.
        Self { was_enabled: unsafe { ffi::PyGC_Disable() } != 0 }
    }
}

impl Drop for GcPause {
    fn drop(&mut self) {
        if self.was_enabled {
            // SAFETY: the guard never leaves the function that made it, which holds the GIL.
            unsafe { ffi::PyGC_Enable() };
        }
    }
}

/// Schedules a call on the interpreter's main thread. Any thread may call this, with or without the GIL, and it never
/// blocks. Don't call it once the interpreter is gone.
pub(crate) fn call_soon(function: extern "C" fn(*mut c_void) -> c_int) {
    // SAFETY: the function accepts the null pointer, and CPython allows this call on any thread. If too many calls are
    // queued, CPython refuses this one. Later calls of the package then do the work.
    let _ = unsafe { ffi::Py_AddPendingCall(Some(function), ptr::null_mut()) };
}
