//! Look up modules that Python has already imported. Third-party libraries are never imported from here.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::once::GilOnce;

/// Returns a module that is already imported.
pub(crate) fn module<'py>(py: Python<'py>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
    static MODULES: GilOnce<Py<PyDict>> = GilOnce::new();
    let modules = || PyResult::Ok(py.import("sys")?.getattr("modules")?.cast_into::<PyDict>()?.unbind());
    MODULES.get_or_try_init(py, modules)?.bind(py).get_item(name)
}
