//! Calls to the interpreter itself.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;

/// Keep Python's cycle collector from running. Keeping ten thousand tensors in place takes ten thousand new objects,
/// none of them garbage. Collecting among them, and then in the whole process, takes longer than creating them.
pub(crate) struct GcPause {
    was_enabled: bool,
}

/// The pauses that have switched the collector off. It changes with the GIL held only.
static GC_PAUSES: AtomicUsize = AtomicUsize::new(0);

impl GcPause {
    pub(crate) fn new(_: Python<'_>) -> Self {
        // SAFETY: the token proves that the GIL is held.
        let was_enabled = unsafe { ffi::PyGC_Disable() } != 0;
        GC_PAUSES.fetch_add(was_enabled.into(), Ordering::Relaxed);
        Self { was_enabled }
    }
}

impl Drop for GcPause {
    fn drop(&mut self) {
        // Not in a child in which it has ended already.
        if self.was_enabled && GC_PAUSES.load(Ordering::Relaxed) > 0 {
            GC_PAUSES.fetch_sub(1, Ordering::Relaxed);
            // SAFETY: a guard is dropped by the function that made it, which holds the GIL, or with the Python object
            // that has it, whose methods and end hold the GIL.
            unsafe { ffi::PyGC_Enable() };
        }
    }
}

/// Ends all pauses, in a forked child: the threads that made them are in the parent.
pub(crate) fn end_gc_pauses(_: Python<'_>) {
    if GC_PAUSES.swap(0, Ordering::Relaxed) > 0 {
        // SAFETY: the token proves that the GIL is held.
        unsafe { ffi::PyGC_Enable() };
    }
}

/// Schedules a call on the interpreter's main thread. Any thread may call this, with or without the GIL, and it never
/// blocks. Don't call it once the interpreter is gone.
pub(crate) fn call_soon(function: extern "C" fn(*mut c_void) -> c_int) {
    // SAFETY: the function accepts the null pointer, and CPython allows this call on any thread. If too many calls are
    // queued, CPython refuses this one. Later calls of the package then do the work.
    let _ = unsafe { ffi::Py_AddPendingCall(Some(function), ptr::null_mut()) };
}
