//! A file that several processes write together: the private file that it is until then, and one process's share of it.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use deepnvme_checkpoint::write::{self, Share};
use deepnvme_io::Target;
use deepnvme_io::stream::Replacement;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use super::raise;
use super::save::{Numbers, numbers};
use crate::engine::PyEngine;
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
    inner: Mutex<Option<Replacement>>,
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
        Ok(Self { temporary, inner: Mutex::new(Some(replacement)) })
    }

    /// Where the bytes go.
    #[getter]
    fn temporary(&self) -> PathBuf {
        self.temporary.clone()
    }

    /// Gives the file its name; with ``sync`` that is on disk then. What is in it has been synced.
    fn commit(&self, py: Python<'_>, sync: bool) -> PyResult<()> {
        let Some(replacement) = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            return Err(PyRuntimeError::new_err("the file has its name, or was given up"));
        };
        let committed = py.detach(|| replacement.commit(sync));
        error::check(py, committed)
    }

    /// Removes it, unless it has its name.
    fn give_up(&self, py: Python<'_>) {
        let replacement = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(replacement));
    }
}

/// A share whose first step is done.
#[pyclass(frozen, name = "_SaveShare", module = "deepnvme._deepnvme")]
pub(crate) struct SaveShare {
    inner: Mutex<Option<Share>>,
    /// The file that is to be, and its size: what errors name.
    target: (PathBuf, u64),
}

impl SaveShare {
    pub(super) fn new(share: Share, target: PathBuf, nbytes: u64) -> Self {
        Self { inner: Mutex::new(Some(share)), target: (target, nbytes) }
    }
}

#[pymethods]
impl SaveShare {
    /// What this process knows, for the others.
    fn tally(&self) -> PyResult<Vec<u8>> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.as_ref().map(Share::tally).ok_or_else(|| PyRuntimeError::new_err("the share is finished"))
    }

    /// Writes the rest, with what the others know, and syncs; the size of the file, and where its index is, how long,
    /// and of which sum.
    #[expect(clippy::needless_pass_by_value, reason = "what Python gives is converted")]
    fn finish(&self, py: Python<'_>, others: Vec<Vec<u8>>) -> PyResult<Numbers> {
        let Some(share) = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            return Err(PyRuntimeError::new_err("the share is finished"));
        };
        let finished = py.detach(|| share.finish(&others));
        let (target, nbytes) = &self.target;
        finished.map(numbers).map_err(|failure| raise(py, &write::named(failure, target, *nbytes)))
    }
}
