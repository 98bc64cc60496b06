//! Pauses of Python's cycle collector, for the package's Python code.

use std::sync::Mutex;

use deepnvme_mem::sync::ignore_poison;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::memory::{GcPause, end_gc_pauses};

/// Keep the cycle collector from running in a ``with`` block. It is native, since a signal handler may run at the
/// beginning of any Python function: its exception in an ``__exit__`` would leave the collector off.
#[pyclass(frozen, name = "_GcPause", module = "deepnvme._deepnvme")]
pub(crate) struct PyGcPause {
    pause: Mutex<Option<GcPause>>,
}

#[pymethods]
impl PyGcPause {
    #[new]
    fn new() -> Self {
        Self { pause: Mutex::new(None) }
    }

    fn __enter__(&self, py: Python<'_>) {
        ignore_poison(self.pause.lock()).get_or_insert_with(|| GcPause::new(py));
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, _error: &Bound<'_, PyTuple>) {
        drop(ignore_poison(self.pause.lock()).take());
    }
}

/// End the pauses of the parent's threads, which a forked child does not have.
#[pyfunction]
pub(crate) fn _end_gc_pauses(py: Python<'_>) {
    end_gc_pauses(py);
}
