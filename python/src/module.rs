//! The package's functions: the methods of `Engine`, on the default engine.

use pyo3::prelude::*;

use crate::default;
use crate::engine::PyEngine;
use crate::probe::Probe;
use crate::request::{Offset, Request};
use crate::stats::Stats;
use crate::timeline::{self, Trace};
use crate::transfer::PyTransfer;

/// Return the engine of the module-level functions, created on first use, one per process. It uses the settings of the
/// file that ``DEEPNVME_CONFIG`` names, or the defaults. A forked process gets its own.
#[pyfunction]
pub(crate) fn default_engine(py: Python<'_>) -> PyResult<Py<PyEngine>> {
    default::object(py)
}

/// Call ``Engine.read`` on the default engine.
#[pyfunction]
#[pyo3(signature = (tensor, path, offset=Offset(0)), text_signature = "(tensor, path, offset=0)")]
pub(crate) fn read(
    py: Python<'_>,
    tensor: &Bound<'_, PyAny>,
    path: &Bound<'_, PyAny>,
    offset: Offset,
) -> PyResult<u64> {
    Request::read(tensor, path, offset)?.run(py, &*default::engine(py)?)
}

/// Call ``Engine.write`` on the default engine.
#[pyfunction]
#[pyo3(signature = (tensor, path, offset=None, *, durability="none"))]
pub(crate) fn write(
    py: Python<'_>,
    tensor: &Bound<'_, PyAny>,
    path: &Bound<'_, PyAny>,
    offset: Option<Offset>,
    durability: &str,
) -> PyResult<u64> {
    Request::write(tensor, path, offset, durability)?.run(py, &*default::engine(py)?)
}

/// Call ``Engine.start_read`` on the default engine.
#[pyfunction]
#[pyo3(signature = (tensor, path, offset=Offset(0)), text_signature = "(tensor, path, offset=0)")]
pub(crate) fn start_read(
    py: Python<'_>,
    tensor: &Bound<'_, PyAny>,
    path: &Bound<'_, PyAny>,
    offset: Offset,
) -> PyResult<PyTransfer> {
    Request::read(tensor, path, offset)?.start(py, &*default::engine(py)?)
}

/// Call ``Engine.start_write`` on the default engine.
#[pyfunction]
#[pyo3(signature = (tensor, path, offset=None, *, durability="none"))]
pub(crate) fn start_write(
    py: Python<'_>,
    tensor: &Bound<'_, PyAny>,
    path: &Bound<'_, PyAny>,
    offset: Option<Offset>,
    durability: &str,
) -> PyResult<PyTransfer> {
    Request::write(tensor, path, offset, durability)?.start(py, &*default::engine(py)?)
}

/// Call ``Engine.read_batch`` on the default engine.
#[pyfunction]
#[pyo3(signature = (items))]
pub(crate) fn read_batch(py: Python<'_>, items: &Bound<'_, PyAny>) -> PyResult<u64> {
    Request::read_batch(items)?.run(py, &*default::engine(py)?)
}

/// Call ``Engine.write_batch`` on the default engine.
#[pyfunction]
#[pyo3(signature = (items, *, durability="none"))]
pub(crate) fn write_batch(py: Python<'_>, items: &Bound<'_, PyAny>, durability: &str) -> PyResult<u64> {
    Request::write_batch(items, durability)?.run(py, &*default::engine(py)?)
}

/// Call ``Engine.start_read_batch`` on the default engine.
#[pyfunction]
#[pyo3(signature = (items))]
pub(crate) fn start_read_batch(py: Python<'_>, items: &Bound<'_, PyAny>) -> PyResult<PyTransfer> {
    Request::read_batch(items)?.start(py, &*default::engine(py)?)
}

/// Call ``Engine.start_write_batch`` on the default engine.
#[pyfunction]
#[pyo3(signature = (items, *, durability="none"))]
pub(crate) fn start_write_batch(py: Python<'_>, items: &Bound<'_, PyAny>, durability: &str) -> PyResult<PyTransfer> {
    Request::write_batch(items, durability)?.start(py, &*default::engine(py)?)
}

/// Return the default engine's counters.
#[pyfunction]
pub(crate) fn stats(py: Python<'_>) -> PyResult<Stats> {
    Ok(Stats::from(default::engine(py)?.stats()))
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

/// Call ``Engine.span`` on the default engine.
#[pyfunction]
pub(crate) fn span(
    py: Python<'_>,
    name: &str,
    lane: &str,
    start_ns: &Bound<'_, PyAny>,
    end_ns: &Bound<'_, PyAny>,
) -> PyResult<()> {
    timeline::span(&*default::engine(py)?, name, lane, timeline::range(start_ns, end_ns)?)
}

/// Report the backends that work on this machine, and the reason for the default engine's choice.
#[pyfunction]
pub(crate) fn probe(py: Python<'_>) -> PyResult<Probe> {
    Probe::of(py, &*default::engine(py)?)
}
