//! Write one process's shard of a file that several processes write together.

use std::path::PathBuf;

use deepnvme_checkpoint::write::{self, Shard};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use super::save::{SavedTuple, saved_tuple};
use super::to_exception;
use crate::threads::UntilTaken;

/// Split a file for at most ``writers`` processes. Returns start and end of each shard.
#[pyfunction]
pub(crate) fn _shard_ranges(nbytes: u64, writers: usize) -> Vec<(u64, u64)> {
    write::shard_ranges(nbytes, writers.max(1)).into_iter().map(|shard| (shard.start, shard.end)).collect()
}

/// A shard whose first step is done.
#[pyclass(frozen, name = "_SaveShard", module = "deepnvme._deepnvme")]
pub(crate) struct SaveShard {
    inner: UntilTaken<Shard>,
    /// The final path and the file's size, for errors.
    target: (PathBuf, u64),
}

impl SaveShard {
    pub(super) fn new(shard: Shard, target: PathBuf, nbytes: u64) -> Self {
        Self { inner: UntilTaken::new(shard), target: (target, nbytes) }
    }
}

#[pymethods]
impl SaveShard {
    /// Return this process's checksums for the other processes.
    fn checksums(&self, py: Python<'_>) -> PyResult<Vec<u8>> {
        let checksums = self.inner.with(py, |shard| shard.checksums());
        checksums.ok_or_else(|| PyRuntimeError::new_err("the shard is finished"))
    }

    /// Write the rest with the others' checksums, and sync. Returns the file size, and the index's offset, size and
    /// checksum.
    #[expect(clippy::needless_pass_by_value, reason = "what Python gives is converted")]
    fn finish(&self, py: Python<'_>, others: Vec<Vec<u8>>) -> PyResult<SavedTuple> {
        let Some(shard) = self.inner.take(py) else {
            return Err(PyRuntimeError::new_err("the shard is finished"));
        };
        let finished = py.detach(|| shard.finish(&others));
        let (target, nbytes) = &self.target;
        finished.map(saved_tuple).map_err(|error| to_exception(py, &write::error_of_target(error, target, *nbytes)))
    }
}
