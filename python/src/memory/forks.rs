//! Hold back forks while threads without the GIL release Python objects.
//!
//! Objects released without the GIL go into a list of PyO3's, under a lock. A fork at that moment would leave the child
//! with a lock that is never unlocked, and its next call into this package would hang. So forks wait until no thread
//! releases objects.

use std::ffi::c_int;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

use pyo3::prelude::*;

/// Forks waiting or running, and threads releasing objects.
static FORKS: AtomicUsize = AtomicUsize::new(0);
static RELEASING: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the signatures match POSIX (the first function) and CPython (the second).
unsafe extern "C" {
    fn pthread_atfork(
        prepare: Option<extern "C" fn()>,
        parent: Option<extern "C" fn()>,
        child: Option<extern "C" fn()>,
    ) -> c_int;

    /// Exported by every CPython since 3.4, though the headers hide it from multi-version extensions.
    fn PyGILState_Check() -> c_int;
}

/// Makes forks wait from now on.
pub(crate) fn watch() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // SAFETY: the interpreter unloads no extension, so the functions stay valid. They touch only integers.
        let _ = unsafe { pthread_atfork(Some(before), Some(after_in_parent), Some(after_in_child)) };
    });
}

/// Releases an object on any thread.
pub(super) fn release(object: Py<PyAny>) {
    // SAFETY: it only reads a variable of this thread.
    if unsafe { PyGILState_Check() } != 0 {
        // While this thread holds the GIL, only a finaliser that runs now can fork. That fork must not wait for this
        // thread.
        return drop(object);
    }
    loop {
        RELEASING.fetch_add(1, Ordering::SeqCst);
        if FORKS.load(Ordering::SeqCst) == 0 {
            break;
        }
        RELEASING.fetch_sub(1, Ordering::SeqCst);
        std::thread::yield_now();
    }
    drop(object);
    RELEASING.fetch_sub(1, Ordering::SeqCst);
}

extern "C" fn before() {
    FORKS.fetch_add(1, Ordering::SeqCst);
    // This is short: those threads only append to a list, and wait for nothing.
    while RELEASING.load(Ordering::SeqCst) > 0 {
        std::thread::yield_now();
    }
}

extern "C" fn after_in_parent() {
    FORKS.fetch_sub(1, Ordering::SeqCst);
}

extern "C" fn after_in_child() {
    // The child has no other threads.
    FORKS.store(0, Ordering::SeqCst);
    RELEASING.store(0, Ordering::SeqCst);
}
