//! Forks of this process, while threads without the GIL let go of Python's objects.
//!
//! What such a thread lets go of goes into a list of PyO3's, under a lock. A fork at that moment would leave the child with a
//! lock that nobody opens: its next call into this package would never return. So a fork waits until no thread is at that.

use std::ffi::c_int;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

use pyo3::prelude::*;

/// Forks that wait or are being made, and threads that are letting go.
static FORKS: AtomicUsize = AtomicUsize::new(0);
static LETTING_GO: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the first is of POSIX, the second of CPython, and they have these types.
unsafe extern "C" {
    fn pthread_atfork(
        prepare: Option<extern "C" fn()>,
        parent: Option<extern "C" fn()>,
        child: Option<extern "C" fn()>,
    ) -> c_int;

    /// Every CPython since 3.4 has it, though the headers hide it from extensions that are built for several of them.
    fn PyGILState_Check() -> c_int;
}

/// Has forks wait from now on.
pub(crate) fn watch() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // SAFETY: the functions stay where they are, as the interpreter unloads no extension, and touch numbers alone.
        let _ = unsafe { pthread_atfork(Some(before), Some(after_in_parent), Some(after_in_child)) };
    });
}

/// Lets go of an object on whatever thread this is.
pub(super) fn let_go(object: Py<PyAny>) {
    // SAFETY: it only looks at a variable of this thread.
    if unsafe { PyGILState_Check() } != 0 {
        // No fork comes while this thread has the GIL, but for one of a finaliser that runs now: it must not wait for this.
        return drop(object);
    }
    loop {
        LETTING_GO.fetch_add(1, Ordering::SeqCst);
        if FORKS.load(Ordering::SeqCst) == 0 {
            break;
        }
        LETTING_GO.fetch_sub(1, Ordering::SeqCst);
        std::thread::yield_now();
    }
    drop(object);
    LETTING_GO.fetch_sub(1, Ordering::SeqCst);
}

extern "C" fn before() {
    FORKS.fetch_add(1, Ordering::SeqCst);
    // For as long as it takes to put something into a list: those threads wait for nobody.
    while LETTING_GO.load(Ordering::SeqCst) > 0 {
        std::thread::yield_now();
    }
}

extern "C" fn after_in_parent() {
    FORKS.fetch_sub(1, Ordering::SeqCst);
}

extern "C" fn after_in_child() {
    // The other threads are the parent's.
    FORKS.store(0, Ordering::SeqCst);
    LETTING_GO.store(0, Ordering::SeqCst);
}
