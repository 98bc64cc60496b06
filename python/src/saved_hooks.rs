//! Hooks of torch for saved tensors. A block's begin and end are native: a signal handler that ran in between would leave
//! the hooks behind, and every later operation of the thread would call them.

use std::sync::Mutex;
use std::thread::{self, ThreadId};

use deepnvme_mem::sync::ignore_poison;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::once::{GilOnce, intern};

/// torch's functions that change the hooks of a thread.
static AUTOGRAD: GilOnce<Py<PyAny>> = GilOnce::new();

/// A ``with`` block in which autograd calls the two functions that ``_make_hooks`` returns, for packing and unpacking.
/// Blocks of one object may be nested, and run in several threads.
#[pyclass(frozen, subclass, name = "_SavedHooksScope", module = "deepnvme._deepnvme")]
pub(crate) struct SavedHooksScope {
    /// The packing functions of the blocks that run, by thread, the innermost last.
    entered: Mutex<Vec<(ThreadId, Py<PyAny>)>>,
}

fn autograd(py: Python<'_>) -> PyResult<&Bound<'_, PyAny>> {
    let find = || py.import("torch._C._autograd").map(|module| module.into_any().unbind());
    AUTOGRAD.get_or_try_init(py, find).map(|module| module.bind(py))
}

#[pymethods]
impl SavedHooksScope {
    #[new]
    #[pyo3(signature = (*_arguments, **_options))]
    fn new(_arguments: &Bound<'_, PyTuple>, _options: Option<&Bound<'_, PyDict>>) -> Self {
        Self { entered: Mutex::new(Vec::new()) }
    }

    fn __enter__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, Self>> {
        let py = slf.py();
        let autograd = autograd(py)?;
        let hooks = slf.call_method0(intern!(py, "_make_hooks"))?;
        let (pack, unpack): (Bound<'py, PyAny>, Bound<'py, PyAny>) = hooks.extract()?;
        autograd.call_method1(intern!(py, "_push_saved_tensors_default_hooks"), (&pack, unpack))?;
        ignore_poison(slf.get().entered.lock()).push((thread::current().id(), pack.unbind()));
        Ok(slf.clone())
    }

    /// Remove the hooks, unless others are the innermost now.
    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyTuple>) -> PyResult<()> {
        let this = thread::current().id();
        let last = {
            let mut entered = ignore_poison(self.entered.lock());
            entered.iter().rposition(|(thread, _)| *thread == this).map(|at| entered.remove(at).1)
        };
        let Some(pack) = last else { return Ok(()) };
        let autograd = autograd(py)?;
        let top = autograd.call_method1(intern!(py, "_top_saved_tensors_default_hooks"), (false,))?;
        if !top.is_none() && top.get_item(0)?.is(&pack) {
            autograd.call_method0(intern!(py, "_pop_saved_tensors_default_hooks"))?;
        }
        Ok(())
    }
}
