//! Finish requests in flight when the interpreter exits.

use std::sync::{Arc, Mutex, Weak};

use deepnvme_mem::sync::ignore_poison;
use pyo3::prelude::*;

use crate::pending_request::PendingRequest;
use crate::{detached_requests, error, reaper};

/// Started requests that are still referenced.
static STARTED: Mutex<Vec<Weak<PendingRequest>>> = Mutex::new(Vec::new());

/// Smallest length at which clearing the list pays off.
const CLEARED_FROM: usize = 64;

/// Registers a request that outlives its call.
pub(crate) fn register(request: &Arc<PendingRequest>) {
    let mut started = ignore_poison(STARTED.lock());
    // Cleared before it grows, so that ended requests do not pile up.
    if started.len() == started.capacity() && started.len() >= CLEARED_FROM {
        started.retain(|request| request.strong_count() > 0);
        let count = started.len();
        started.reserve_exact(count.max(CLEARED_FROM));
    }
    started.push(Arc::downgrade(request));
}

/// Finish transfers in flight before the interpreter exits. Ctrl-C cancels those not yet started. Unobserved failures
/// become warnings.
#[pyfunction]
pub(crate) fn _at_exit(py: Python<'_>) -> PyResult<()> {
    // Calls of `__del__` methods that come later cannot import it.
    error::module(py)?;
    let started = std::mem::take(&mut *ignore_poison(STARTED.lock()));
    let started: Vec<_> =
        started.iter().filter_map(Weak::upgrade).filter(|request| !request.is_from_before_fork()).collect();
    for request in &started {
        if let Err(interrupt) = request.wait(py, None) {
            for request in &started {
                request.cancel();
            }
            return Err(interrupt);
        }
    }
    drop(started);
    reaper::stop();
    detached_requests::reap_all(py);
    Ok(())
}
