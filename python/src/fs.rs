//! Calls of the file system for Python: read a small file, open a regular file, create folders.

use std::os::fd::{IntoRawFd, RawFd};

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error;
use crate::path::file_name;

/// Read a regular file of at most ``max_nbytes``. For a pipe, a device or a longer file, raises
/// without blocking.
#[pyfunction]
pub(crate) fn _read_small_file<'py>(path: &Bound<'py, PyAny>, max_nbytes: u64) -> PyResult<Bound<'py, PyBytes>> {
    let (py, name) = (path.py(), file_name(path)?);
    let bytes = py.detach(|| deepnvme_io::fs::read_small(&name, max_nbytes));
    Ok(PyBytes::new(py, &error::check(py, bytes)?))
}

/// Open a regular file for reading. Returns its descriptor, which the caller owns. For a pipe or a device, raises
/// without blocking.
#[pyfunction]
pub(crate) fn _open_regular(path: &Bound<'_, PyAny>) -> PyResult<RawFd> {
    let (py, name) = (path.py(), file_name(path)?);
    let opened = py.detach(|| deepnvme_io::fs::open_regular(&name));
    Ok(error::check(py, opened)?.into_raw_fd())
}

/// Create a folder and its missing parents.
#[pyfunction]
pub(crate) fn _make_folders(path: &Bound<'_, PyAny>) -> PyResult<()> {
    let (py, name) = (path.py(), file_name(path)?);
    error::check(py, py.detach(|| deepnvme_io::fs::make_folders(&name)))
}
