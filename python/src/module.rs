//! The package's functions: the methods of `Engine`, on the default engine.

use pyo3::prelude::*;

use crate::default;
use crate::docs::docs;
use crate::engine::PyEngine;
use crate::probe::Probe;
use crate::request::Offset;
use crate::settings::Word;
use crate::stats::Stats;
use crate::timeline::Trace;
use crate::transfer::PyTransfer;

/// Defines functions with the same arguments, each of which calls the method of its name on the default engine.
macro_rules! on_default_engine {
    (#[$signature:meta] $arguments:tt $($method:ident -> $result:ty),+) => {
        $(on_default_engine!(@one #[$signature] $method $arguments -> $result);)+
    };
    (@one #[$signature:meta] $method:ident ($($argument:ident: $kind:ty),+) -> $result:ty) => {
        #[doc = docs!($method)]
        #[pyfunction]
        #[$signature]
        pub(crate) fn $method(py: Python<'_>, $($argument: $kind),+) -> PyResult<$result> {
            default::object(py)?.get().$method(py, $($argument),+)
        }
    };
}

/// Return the engine of the module-level functions. It is created on first use.
///
/// There is one per process, and a forked process gets its own. It has the settings of the file that the environment
/// variable ``DEEPNVME_CONFIG`` names, or the defaults.
///
/// Returns:
///     An ``Engine``.
///
/// Raises:
///     FileNotFoundError, ValueError: the file of ``DEEPNVME_CONFIG`` does not exist or has invalid settings.
///
/// Example:
///     >>> deepnvme.default_engine().block_bytes
///     2097152
#[pyfunction]
pub(crate) fn default_engine(py: Python<'_>) -> PyResult<Py<PyEngine>> {
    default::object(py)
}

on_default_engine! {
    #[pyo3(signature = (tensor, path, offset=Offset(0)), text_signature = "(tensor, path, offset=0)")]
    (tensor: &Bound<'_, PyAny>, path: &Bound<'_, PyAny>, offset: Offset)
    read -> u64, start_read -> PyTransfer
}

on_default_engine! {
    #[pyo3(
        signature = (tensor, path, offset=None, *, durability=Word::Text("none")),
        text_signature = "(tensor, path, offset=None, *, durability=\"none\")"
    )]
    (tensor: &Bound<'_, PyAny>, path: &Bound<'_, PyAny>, offset: Option<Offset>, durability: Word<'_, '_>)
    write -> u64, start_write -> PyTransfer
}

on_default_engine! {
    #[pyo3(signature = (items))]
    (items: &Bound<'_, PyAny>)
    read_batch -> u64, start_read_batch -> PyTransfer
}

on_default_engine! {
    #[pyo3(
        signature = (items, *, durability=Word::Text("none")),
        text_signature = "(items, *, durability=\"none\")"
    )]
    (items: &Bound<'_, PyAny>, durability: Word<'_, '_>)
    write_batch -> u64, start_write_batch -> PyTransfer
}

on_default_engine! {
    #[pyo3(signature = (name, lane, start_ns, end_ns))]
    (name: Word<'_, '_>, lane: Word<'_, '_>, start_ns: &Bound<'_, PyAny>, end_ns: &Bound<'_, PyAny>)
    span -> ()
}

#[doc = docs!(stats)]
#[pyfunction]
pub(crate) fn stats(py: Python<'_>) -> PyResult<Stats> {
    default::object(py)?.get().stats(py)
}

#[doc = docs!(trace)]
#[pyfunction]
pub(crate) fn trace(py: Python<'_>, path: &Bound<'_, PyAny>) -> PyResult<Trace> {
    default::object(py)?.get().trace(path)
}

#[doc = docs!(probe)]
#[pyfunction]
pub(crate) fn probe(py: Python<'_>) -> PyResult<Probe> {
    default::object(py)?.get().probe(py)
}
