//! The end of the interpreter with requests in flight.

use std::sync::{Arc, Mutex, Weak};

use deepnvme_mem::sync::ignore_poison;
use pyo3::prelude::*;

use crate::flight::Flight;
use crate::{orphans, watch};

/// The requests that were started, for as long as anybody holds them.
static STARTED: Mutex<Vec<Weak<Flight>>> = Mutex::new(Vec::new());

/// Below that many there is no point in clearing the list.
const CLEARED_FROM: usize = 64;

/// Notes a request that outlives the call that made it.
pub(crate) fn note(flight: &Arc<Flight>) {
    let mut started = ignore_poison(STARTED.lock());
    // Cleared when it would grow, so that it is never longer than twice what is alive.
    if started.len() == started.capacity() && started.len() >= CLEARED_FROM {
        started.retain(|flight| flight.strong_count() > 0);
        let room = started.len();
        started.reserve_exact(room.max(CLEARED_FROM));
    }
    started.push(Arc::downgrade(flight));
}

/// Finishes what is in flight before the interpreter goes; Ctrl-C gives up what has not been started. Failures
/// that nobody will look at become warnings.
#[pyfunction]
pub(crate) fn _at_exit(py: Python<'_>) -> PyResult<()> {
    let started = std::mem::take(&mut *ignore_poison(STARTED.lock()));
    let started: Vec<_> = started.iter().filter_map(Weak::upgrade).filter(|flight| !flight.is_foreign()).collect();
    for flight in &started {
        if let Err(interrupt) = flight.wait(py, None) {
            for flight in &started {
                flight.cancel();
            }
            return Err(interrupt);
        }
    }
    drop(started);
    watch::end();
    orphans::sweep_all(py);
    Ok(())
}
