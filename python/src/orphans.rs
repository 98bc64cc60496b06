//! Requests whose `Transfer` was dropped while they were in flight.
//!
//! They go on, and their tensors stay alive until they are done. Then their tensors are let go of, and those that failed
//! are warned of: nobody else would. `watch` has the interpreter do that; each later call of the package looks at a few
//! of them as well, since the interpreter's main thread may be busy.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use deepnvme_io::{Error, ErrorKind};
use deepnvme_mem::sync::ignore_poison;
use pyo3::exceptions::PyResourceWarning;
use pyo3::prelude::*;

use crate::flight::Flight;

/// How many orphans one call looks at, so that no call is slow.
const LOOKS_PER_CALL: usize = 16;

static ORPHANS: Mutex<VecDeque<Arc<Flight>>> = Mutex::new(VecDeque::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Keeps a request until a sweep finds it done.
pub(crate) fn keep(flight: Arc<Flight>) {
    with(|orphans| orphans.push_back(flight));
}

/// Lets go of a few that are done. Costs nothing where there are none.
pub(crate) fn sweep(py: Python<'_>) {
    if COUNT.load(Ordering::Relaxed) > 0 {
        sweep_some(py, LOOKS_PER_CALL);
    }
}

/// Lets go of all that are done.
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

/// The lock is held for moments only, and never while the GIL is let go of, so that no fork finds it locked.
fn with<T>(act: impl FnOnce(&mut VecDeque<Arc<Flight>>) -> T) -> T {
    let mut orphans = ignore_poison(ORPHANS.lock());
    let answer = act(&mut orphans);
    COUNT.store(orphans.len(), Ordering::Relaxed);
    answer
}

/// A failure that nobody looked at becomes a `ResourceWarning`; a cancelled request is no failure.
pub(crate) fn warn_of(py: Python<'_>, error: &Error) {
    if error.kind() != ErrorKind::Cancelled {
        warn(py, &format!("nobody looked at the failure of a request: {error}"));
    }
}

/// Warns from a place that can raise nothing: with `-W error` the warning goes where exceptions in finalisers go.
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
