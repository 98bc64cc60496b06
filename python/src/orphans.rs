//! Requests whose `Transfer` was dropped in flight.
//!
//! They continue, and their tensors stay alive until they are done. Then the tensors are released, and failures become
//! warnings, since no caller sees them. `watch` makes the interpreter do that. Each later call of the package also
//! sweeps a few, in case the interpreter's main thread is busy.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use deepnvme_io::{Error, ErrorKind};
use deepnvme_mem::sync::ignore_poison;
use pyo3::exceptions::PyResourceWarning;
use pyo3::prelude::*;

use crate::flight::Flight;

/// Orphans that one call checks, so that no call is slow.
const LOOKS_PER_CALL: usize = 16;

static ORPHANS: Mutex<VecDeque<Arc<Flight>>> = Mutex::new(VecDeque::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Keep a request until a sweep finds it done.
pub(crate) fn keep(flight: Arc<Flight>) {
    with(|orphans| orphans.push_back(flight));
}

/// Release a few finished requests. Free if there are none.
pub(crate) fn sweep(py: Python<'_>) {
    if COUNT.load(Ordering::Relaxed) > 0 {
        sweep_some(py, LOOKS_PER_CALL);
    }
}

/// Release all finished requests.
pub(crate) fn sweep_all(py: Python<'_>) {
    sweep_some(py, COUNT.load(Ordering::Relaxed));
}

fn sweep_some(py: Python<'_>, looks: usize) {
    let mut ended = Vec::new();
    with(|orphans| {
        for _ in 0..looks.min(orphans.len()) {
            match orphans.pop_front() {
                Some(flight) if flight.is_done() || flight.is_foreign() => ended.push(flight),
                Some(flight) => orphans.push_back(flight),
                None => {}
            }
        }
    });
    for flight in ended {
        if let (false, Some(Err(error))) = (flight.is_foreign(), flight.result()) {
            warn_of(py, &error);
        }
    }
}

/// The lock is held only briefly, and never while the GIL is released, so that no fork finds it locked.
fn with<T>(act: impl FnOnce(&mut VecDeque<Arc<Flight>>) -> T) -> T {
    let mut orphans = ignore_poison(ORPHANS.lock());
    let answer = act(&mut orphans);
    COUNT.store(orphans.len(), Ordering::Relaxed);
    answer
}

/// Turn an unobserved failure into a `ResourceWarning`. A cancelled request is no failure.
pub(crate) fn warn_of(py: Python<'_>, error: &Error) {
    if error.kind() != ErrorKind::Cancelled {
        warn(py, &format!("nobody looked at the failure of a request: {error}"));
    }
}

/// Warn from a place that cannot raise. With `-W error` the warning is reported like an exception in a finaliser.
pub(crate) fn warn(py: Python<'_>, message: &str) {
    let in_flight = PyErr::take(py);
    let category = py.get_type::<PyResourceWarning>();
    let message = std::ffi::CString::new(message.replace('\0', "?")).unwrap_or_default();
    if let Err(error) = PyErr::warn(py, &category, &message, 1) {
        error.write_unraisable(py, None);
    }
    if let Some(error) = in_flight {
        error.restore(py);
    }
}
