//! A new file under its private name.

use std::path::PathBuf;

use deepnvme_checkpoint::write;
use deepnvme_file::{Replacement, Target};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use super::to_exception;
use crate::engine::PyEngine;
use crate::threads::UntilTaken;
use crate::{default, error};

/// A private file. ``commit`` renames it to ``path``; otherwise it is deleted.
#[pyclass(frozen, name = "_NewFile", module = "deepnvme._deepnvme")]
pub(crate) struct NewFile {
    temporary: PathBuf,
    inner: UntilTaken<Replacement>,
}

#[pymethods]
impl NewFile {
    #[new]
    #[pyo3(signature = (path, nbytes, engine))]
    fn new(py: Python<'_>, path: PathBuf, nbytes: u64, engine: Option<&Bound<'_, PyEngine>>) -> PyResult<Self> {
        let engine = default::or_default(py, engine)?;
        let target = Target::Path(path);
        let created = py.detach(|| write::create(&engine, &target, nbytes));
        let (replacement, _) =
            created.map_err(|error| to_exception(py, &write::error_of_target(error, &target.path(), nbytes)))?;
        let temporary = replacement.temporary().path();
        Ok(Self { temporary, inner: UntilTaken::new(replacement) })
    }

    /// The file's private path.
    #[getter]
    fn temporary(&self) -> PathBuf {
        self.temporary.clone()
    }

    /// Give the file the permissions that it will have as ``path``. Its contents are already synced.
    fn take_mode(&self, py: Python<'_>) -> PyResult<()> {
        let taken = self.inner.with(py, |replacement| replacement.take_mode());
        error::check(py, taken.ok_or_else(already_taken)?)
    }

    /// Keep the file under its private name, which a manifest lists.
    fn keep(&self, py: Python<'_>) {
        let replacement = self.take(py);
        py.detach(|| replacement.map(Replacement::keep));
    }

    /// Rename the file to its final name, and sync that with ``sync``. Its contents are already synced.
    fn commit(&self, py: Python<'_>, sync: bool) -> PyResult<()> {
        let Some(replacement) = self.take(py) else { return Err(already_taken()) };
        let committed = py.detach(|| replacement.commit(sync));
        error::check(py, committed)
    }

    /// Delete the file unless it was committed or kept.
    fn discard(&self, py: Python<'_>) {
        let replacement = self.take(py);
        py.detach(|| drop(replacement));
    }
}

impl NewFile {
    /// Wraps a file that is written and synced.
    pub(super) fn of(replacement: Replacement) -> Self {
        Self { temporary: replacement.temporary().path(), inner: UntilTaken::new(replacement) }
    }

    /// Takes the file; `None` if it was committed or discarded.
    pub(super) fn take(&self, py: Python<'_>) -> Option<Replacement> {
        self.inner.take(py)
    }
}

/// The error after the file was committed or discarded.
pub(super) fn already_taken() -> PyErr {
    PyRuntimeError::new_err("this file was already committed or discarded; create another one")
}
