//! A file that several processes write together: one process's share of it.

use std::path::PathBuf;

use deepnvme_checkpoint::write::{self, Share};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use super::raise;
use super::save::{Numbers, numbers};
use crate::threads::Ending;

/// The shares of at most so many writers: where each begins and ends.
#[pyfunction]
pub(crate) fn _shares(nbytes: u64, writers: usize) -> Vec<(u64, u64)> {
    write::shares(nbytes, writers.max(1)).into_iter().map(|share| (share.start, share.end)).collect()
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
