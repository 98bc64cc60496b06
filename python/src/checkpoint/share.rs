//! A file that several processes write together: the private file that it is until then, and one process's share of it.

use std::path::PathBuf;

use deepnvme_checkpoint::write::{self, Share};
use deepnvme_io::Target;
use deepnvme_io::stream::Replacement;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use super::raise;
use super::save::{Numbers, numbers};
use crate::engine::PyEngine;
use crate::threads::Ending;
use crate::{default, error};

/// The shares of at most so many writers: where each begins and ends.
#[pyfunction]
pub(crate) fn _shares(nbytes: u64, writers: usize) -> Vec<(u64, u64)> {
    write::shares(nbytes, writers.max(1)).into_iter().map(|share| (share.start, share.end)).collect()
}

/// A private file, which becomes ``path`` when it is committed, and goes when it is not.
#[pyclass(frozen, name = "_NewFile", module = "deepnvme._deepnvme")]
pub(crate) struct NewFile {
    temporary: PathBuf,
    inner: Ending<Replacement>,
}

#[pymethods]
impl NewFile {
    #[new]
    #[pyo3(signature = (path, nbytes, engine))]
    fn new(py: Python<'_>, path: PathBuf, nbytes: u64, engine: Option<&Bound<'_, PyEngine>>) -> PyResult<Self> {
        let engine = default::or_default(py, engine)?;
        let target = Target::Path(path);
        let created = py.detach(|| write::create(&engine, &target, nbytes));
        let (replacement, _) = created.map_err(|failure| raise(py, &write::named(failure, &target.path(), nbytes)))?;
        let temporary = replacement.temporary().path();
        Ok(Self { temporary, inner: Ending::new(replacement) })
    }

    /// Where the bytes go.
    #[getter]
    fn temporary(&self) -> PathBuf {
        self.temporary.clone()
    }

    /// Gives it the permissions of a new file. What is in it has been synced.
    fn take_mode(&self, py: Python<'_>) -> PyResult<()> {
        let taken = self.inner.with(py, |replacement| replacement.take_mode());
        error::check(py, taken.ok_or_else(over)?)
    }

    /// Leaves it under its private name, which a manifest has.
    fn keep(&self, py: Python<'_>) {
        let replacement = self.take(py);
        py.detach(|| replacement.map(Replacement::keep));
    }

    /// Gives the file its name; with ``sync`` that is on disk then. What is in it has been synced.
    fn commit(&self, py: Python<'_>, sync: bool) -> PyResult<()> {
        let Some(replacement) = self.take(py) else { return Err(over()) };
        let committed = py.detach(|| replacement.commit(sync));
        error::check(py, committed)
    }

    /// Removes it, unless it has its name.
    fn give_up(&self, py: Python<'_>) {
        let replacement = self.take(py);
        py.detach(|| drop(replacement));
    }
}

impl NewFile {
    /// A file that is written and synced.
    pub(super) fn of(replacement: Replacement) -> Self {
        Self { temporary: replacement.temporary().path(), inner: Ending::new(replacement) }
    }

    /// The file, unless it has its name or was given up.
    pub(super) fn take(&self, py: Python<'_>) -> Option<Replacement> {
        self.inner.take(py)
    }
}

/// That there is nothing left to do something with.
pub(super) fn over() -> PyErr {
    PyRuntimeError::new_err("the file has its name, or was given up")
}

/// A share whose first step is done.
#[pyclass(frozen, name = "_SaveShare", module = "deepnvme._deepnvme")]
pub(crate) struct SaveShare {
    inner: Ending<Share>,
    /// The file that is to be, and its size: what errors name.
    target: (PathBuf, u64),
}

impl SaveShare {
    pub(super) fn new(share: Share, target: PathBuf, nbytes: u64) -> Self {
        Self { inner: Ending::new(share), target: (target, nbytes) }
    }
}

#[pymethods]
impl SaveShare {
    /// What this process knows, for the others.
    fn tally(&self, py: Python<'_>) -> PyResult<Vec<u8>> {
        let tally = self.inner.with(py, |share| share.tally());
        tally.ok_or_else(|| PyRuntimeError::new_err("the share is finished"))
    }

    /// Writes the rest, with what the others know, and syncs; the size of the file, and where its index is, how long,
    /// and of which sum.
    #[expect(clippy::needless_pass_by_value, reason = "what Python gives is converted")]
    fn finish(&self, py: Python<'_>, others: Vec<Vec<u8>>) -> PyResult<Numbers> {
        let Some(share) = self.inner.take(py) else {
            return Err(PyRuntimeError::new_err("the share is finished"));
        };
        let finished = py.detach(|| share.finish(&others));
        let (target, nbytes) = &self.target;
        finished.map(numbers).map_err(|failure| raise(py, &write::named(failure, target, *nbytes)))
    }
}
