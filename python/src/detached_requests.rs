//! Requests whose `Transfer` was dropped in flight.
//!
//! They continue, and their tensors stay alive until they are done. Then the tensors are released, and failures become
//! warnings, since no caller sees them. `reaper` makes the interpreter do that. Each later call of the package also
//! releases a few, in case the interpreter's main thread is busy.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use deepnvme_io::{Error, ErrorKind};
use deepnvme_mem::sync::ignore_poison;
use pyo3::exceptions::PyResourceWarning;
use pyo3::prelude::*;

use crate::pending_request::PendingRequest;

/// Requests that one call checks, so that no call is slow.
const CHECKS_PER_CALL: usize = 16;

static DETACHED: Mutex<VecDeque<Arc<PendingRequest>>> = Mutex::new(VecDeque::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Keeps a request until a later call finds it done.
pub(crate) fn add(request: Arc<PendingRequest>) {
    with_requests(|requests| requests.push_back(request));
}

/// Releases a few finished requests. Costs almost nothing if there are none.
pub(crate) fn reap(py: Python<'_>) {
    if COUNT.load(Ordering::Relaxed) > 0 {
        reap_some(py, CHECKS_PER_CALL);
    }
}

/// Releases all finished requests.
pub(crate) fn reap_all(py: Python<'_>) {
    reap_some(py, COUNT.load(Ordering::Relaxed));
}

fn reap_some(py: Python<'_>, checks: usize) {
    let mut ended = Vec::new();
    with_requests(|requests| {
        for _ in 0..checks.min(requests.len()) {
            match requests.pop_front() {
                Some(request) if request.is_done() || request.is_from_before_fork() => ended.push(request),
                Some(request) => requests.push_back(request),
                None => {}
            }
        }
    });
    for request in ended {
        if let (false, Some(Err(error))) = (request.is_from_before_fork(), request.result()) {
            warn_of_failure(py, &error);
        }
    }
}

/// Runs `act` on the requests. It holds the lock only briefly and keeps the GIL, so that no fork finds it locked.
fn with_requests<T>(act: impl FnOnce(&mut VecDeque<Arc<PendingRequest>>) -> T) -> T {
    let mut requests = ignore_poison(DETACHED.lock());
    let result = act(&mut requests);
    COUNT.store(requests.len(), Ordering::Relaxed);
    result
}

/// Turns an unobserved failure into a `ResourceWarning`. A cancelled request is no failure.
pub(crate) fn warn_of_failure(py: Python<'_>, error: &Error) {
    if error.kind() != ErrorKind::Cancelled {
        warn(py, &format!("the error of a dropped request was never retrieved: {error}"));
    }
}

/// Warns from a place that cannot raise. With `-W error` the warning is reported like an exception in a finaliser.
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
