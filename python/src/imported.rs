//! Look up modules that Python has already imported. Third-party libraries are never imported from here.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

/// Returns a module that is already imported.
pub(crate) fn module<'py>(py: Python<'py>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
    static MODULES: PyOnceLock<Py<PyDict>> = PyOnceLock::new();
    if let Some(modules) = MODULES.get(py) {
        return modules.bind(py).get_item(name);
    }
    // Resolved before the cell is locked: see `memory::resizable`.
    let modules = py.import("sys")?.getattr("modules")?.cast_into::<PyDict>()?.unbind();
    MODULES.get_or_init(py, || modules).bind(py).get_item(name)
}
