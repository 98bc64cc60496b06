//! The package's functions: the methods of `Engine`, on the default engine.

use pyo3::prelude::*;

use crate::default;
use crate::engine::PyEngine;
use crate::probe::Probe;
use crate::request::Offset;
use crate::stats::Stats;
use crate::timeline::Trace;
use crate::transfer::PyTransfer;

/// Defines a function that calls the method of its name on the default engine.
macro_rules! on_default_engine {
    ($(#[$attribute:meta])* $method:ident($($argument:ident: $kind:ty),*) -> $result:ty) => {
        #[pyfunction]
        $(#[$attribute])*
        pub(crate) fn $method(py: Python<'_>, $($argument: $kind),*) -> PyResult<$result> {
            default::object(py)?.get().$method(py, $($argument),*)
        }
    };
}

/// Return the engine of the module-level functions, created on first use, one per process. It uses the settings of the
/// file that ``DEEPNVME_CONFIG`` names, or the defaults. A forked process gets its own.
#[pyfunction]
pub(crate) fn default_engine(py: Python<'_>) -> PyResult<Py<PyEngine>> {
    default::object(py)
}

on_default_engine! {
    /// Call ``Engine.read`` on the default engine.
    #[pyo3(signature = (tensor, path, offset=Offset(0)), text_signature = "(tensor, path, offset=0)")]
    read(tensor: &Bound<'_, PyAny>, path: &Bound<'_, PyAny>, offset: Offset) -> u64
}

on_default_engine! {
    /// Call ``Engine.write`` on the default engine.
    #[pyo3(signature = (tensor, path, offset=None, *, durability="none"))]
    write(tensor: &Bound<'_, PyAny>, path: &Bound<'_, PyAny>, offset: Option<Offset>, durability: &str) -> u64
}

on_default_engine! {
    /// Call ``Engine.start_read`` on the default engine.
    #[pyo3(signature = (tensor, path, offset=Offset(0)), text_signature = "(tensor, path, offset=0)")]
    start_read(tensor: &Bound<'_, PyAny>, path: &Bound<'_, PyAny>, offset: Offset) -> PyTransfer
}

on_default_engine! {
    /// Call ``Engine.start_write`` on the default engine.
    #[pyo3(signature = (tensor, path, offset=None, *, durability="none"))]
    start_write(tensor: &Bound<'_, PyAny>, path: &Bound<'_, PyAny>, offset: Option<Offset>, durability: &str) -> PyTransfer
}

on_default_engine! {
    /// Call ``Engine.read_batch`` on the default engine.
    #[pyo3(signature = (items))]
    read_batch(items: &Bound<'_, PyAny>) -> u64
}

on_default_engine! {
    /// Call ``Engine.write_batch`` on the default engine.
    #[pyo3(signature = (items, *, durability="none"))]
    write_batch(items: &Bound<'_, PyAny>, durability: &str) -> u64
}

on_default_engine! {
    /// Call ``Engine.start_read_batch`` on the default engine.
    #[pyo3(signature = (items))]
    start_read_batch(items: &Bound<'_, PyAny>) -> PyTransfer
}

on_default_engine! {
    /// Call ``Engine.start_write_batch`` on the default engine.
    #[pyo3(signature = (items, *, durability="none"))]
    start_write_batch(items: &Bound<'_, PyAny>, durability: &str) -> PyTransfer
}

on_default_engine! {
    /// Return the default engine's counters.
    stats() -> Stats
}

/// Call ``Engine.trace`` on the default engine.
///
/// Example:
///     >>> with deepnvme.trace("timeline.json"):
///     ...     deepnvme.write(tensor, "weights.bin")
///     4096
#[pyfunction]
pub(crate) fn trace(py: Python<'_>, path: &Bound<'_, PyAny>) -> PyResult<Trace> {
    default::object(py)?.get().trace(path)
}

on_default_engine! {
    /// Call ``Engine.span`` on the default engine.
    span(name: &str, lane: &str, start_ns: &Bound<'_, PyAny>, end_ns: &Bound<'_, PyAny>) -> ()
}

on_default_engine! {
    /// Report the backends that work on this machine, and the reason for the default engine's choice.
    probe() -> Probe
}
