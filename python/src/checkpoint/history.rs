//! The folder of a `Checkpointer`, for `deepnvme._checkpoint.history`. Manifests are passed as text.

use std::path::PathBuf;
use std::sync::Arc;

use deepnvme_checkpoint::history::{self, History, Manifest, ManifestEntry, Settled};
use pyo3::prelude::*;

use super::new_file::{NewFile, already_taken};
use super::to_exception;
use crate::error::{self, InvalidArgumentError};
use crate::interruptible;
use crate::threads::UntilTaken;

/// Result of settling: names taken by foreign files, failures, checkpoints in place, and retired checkpoints deleted.
type SettledTuple = (Vec<String>, Vec<String>, Vec<String>, Vec<String>);

/// Manage one process's view of a checkpoint folder. Signal handlers run inside ``read`` only.
#[pyclass(frozen, name = "_History", module = "deepnvme._deepnvme")]
pub(crate) struct PyHistory {
    inner: Arc<History>,
}

impl Drop for PyHistory {
    /// Releases the lock, which reads and removes a file, without the GIL.
    fn drop(&mut self) {
        let mut inner = Some(std::mem::replace(&mut self.inner, Arc::new(History::new(PathBuf::new(), None, false))));
        Python::try_attach(|py| {
            let inner = inner.take();
            py.detach(|| drop(inner));
        });
    }
}

#[pymethods]
impl PyHistory {
    #[new]
    #[pyo3(signature = (folder, keep, synced))]
    fn new(folder: PathBuf, keep: Option<usize>, synced: bool) -> Self {
        Self { inner: Arc::new(History::new(folder, keep, synced)) }
    }

    /// Create the folder.
    fn make(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.inner.make()).map_err(|error| to_exception(py, &error))
    }

    /// Read the manifest's text, without checkpoints whose files are missing. Ctrl-C ends it, as a manifest of hundreds
    /// of megabytes takes seconds. It is not read again while this process holds the lock.
    fn read(&self, py: Python<'_>) -> PyResult<String> {
        let inner = Arc::clone(&self.inner);
        let read = move || inner.read().map(|manifest| manifest.text());
        if !self.inner.is_claimed() {
            let text = interruptible::run_read_only(py, read.clone())?;
            // Unless a signal handler has saved here meanwhile, and knows more.
            if !self.inner.is_claimed() {
                return text.map_err(|error| to_exception(py, &error));
            }
        }
        py.detach(read).map_err(|error| to_exception(py, &error))
    }

    /// Step and file of the listed checkpoints that the last ``read`` omitted because their files are missing.
    #[getter]
    fn missing(&self) -> Vec<(u64, String)> {
        self.inner.missing().into_iter().map(|missing| (missing.step, missing.file)).collect()
    }

    /// The names of unlisted checkpoints.
    fn unlisted(&self, py: Python<'_>) -> Vec<String> {
        py.detach(|| self.inner.unlisted())
    }

    /// The manifest as this process knows it.
    #[getter]
    fn text(&self, py: Python<'_>) -> String {
        py.detach(|| self.inner.manifest().text())
    }

    /// Adopt the leader's manifest.
    fn adopt_shared(&self, text: &str) -> PyResult<()> {
        self.inner.adopt_shared(Manifest::parse(text.as_bytes()).map_err(InvalidArgumentError::new_err)?);
        Ok(())
    }

    /// Take the lock under that name. Returns the names of unlisted checkpoints, and whether the file system lacks
    /// locks.
    fn claim(&self, py: Python<'_>, name: String, group_id: String, is_leader: bool) -> PyResult<(Vec<String>, bool)> {
        let holder = history::Holder::new(name, group_id);
        let claimed = py.detach(|| self.inner.claim(&holder, is_leader));
        claimed.map(|claim| (claim.unlisted, claim.lacks_locks)).map_err(|error| to_exception(py, &error))
    }

    /// Whether this process holds the lock.
    #[getter]
    fn is_claimed(&self) -> bool {
        self.inner.is_claimed()
    }

    /// Release the lock.
    fn release(&self, py: Python<'_>) {
        py.detach(|| self.inner.release());
    }

    /// Close the lock file in a forked child.
    fn abandon(&self) {
        self.inner.abandon();
    }

    /// List the names in the folder that belong to a step.
    fn names_of(&self, py: Python<'_>, step: u64) -> PyResult<Vec<String>> {
        py.detach(|| self.inner.names_of(step)).map_err(|error| to_exception(py, &error))
    }

    /// Reserve a name that no file has, neither here nor in ``taken``.
    #[expect(clippy::needless_pass_by_value, reason = "what Python gives is converted")]
    fn reserve(&self, py: Python<'_>, step: u64, suffix: &str, taken: Vec<String>) -> PyResult<String> {
        py.detach(|| self.inner.reserve(step, suffix, &taken)).map_err(|error| to_exception(py, &error))
    }

    /// Release a reserved name.
    fn release_name(&self, name: &str) {
        self.inner.release_name(name);
    }

    /// Publish a checkpoint, rename its file, and delete retired checkpoints. Checkpoints of the steps in ``newer`` keep
    /// their places after this one.
    #[expect(clippy::needless_pass_by_value, reason = "what Python gives is converted")]
    fn commit(&self, py: Python<'_>, entry: &str, new: &Bound<'_, NewFile>, newer: Vec<u64>) -> PyResult<SettledTuple> {
        let entry = parse_entry(entry)?;
        let Some(replacement) = new.get().take(py) else { return Err(already_taken()) };
        let committed = py.detach(|| self.inner.commit(entry, Some(replacement), &newer));
        committed.map(settled_tuple).map_err(|error| to_exception(py, &error))
    }

    /// Publish a checkpoint whose files still have private names.
    fn publish(&self, py: Python<'_>, entry: &str) -> PyResult<()> {
        let entry = parse_entry(entry)?;
        py.detach(|| self.inner.publish(&entry, &[])).map_err(|error| to_exception(py, &error))
    }

    /// Return whether the manifest on disk lists that file; ``None`` if it cannot be read.
    fn is_committed(&self, py: Python<'_>, file: &str) -> Option<bool> {
        py.detach(|| self.inner.is_committed(file))
    }

    /// Rename the files of this machine, and delete retired checkpoints.
    fn settle(&self, py: Python<'_>) -> SettledTuple {
        settled_tuple(py.detach(|| self.inner.settle()))
    }

    /// Record the checkpoints in place, and the retired ones deleted, on all machines.
    #[expect(clippy::needless_pass_by_value, reason = "what Python gives is converted")]
    fn record_settled(&self, placed: Vec<String>, gone: Vec<String>) {
        self.inner.record_settled(&placed, &gone);
    }
}

/// Return the paths of a manifest's checkpoints, in its order.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "what Python gives is converted")]
pub(crate) fn _checkpoint_paths(py: Python<'_>, folder: PathBuf, text: &str) -> PyResult<Vec<PathBuf>> {
    let manifest = Manifest::parse(text.as_bytes()).map_err(InvalidArgumentError::new_err)?;
    let path = |entry: &ManifestEntry| history::find_file(&folder, &entry.file, entry);
    Ok(py.detach(|| manifest.checkpoints.iter().map(path).collect()))
}

/// A folder with a private name. It is deleted unless it is kept.
#[pyclass(frozen, name = "_NewFolder", module = "deepnvme._deepnvme")]
pub(crate) struct NewFolder {
    path: PathBuf,
    inner: UntilTaken<history::PrivateFolder>,
}

#[pymethods]
impl NewFolder {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "what Python gives is converted")]
    fn new(py: Python<'_>, parent: PathBuf, name: &str) -> PyResult<Self> {
        let made = py.detach(|| history::PrivateFolder::new(&parent, name));
        let folder = error::check(py, made)?;
        Ok(Self { path: folder.path().to_path_buf(), inner: UntilTaken::new(folder) })
    }

    /// The folder's path.
    #[getter]
    fn path(&self) -> PathBuf {
        self.path.clone()
    }

    /// Keep the folder, whatever its name is.
    fn keep(&self, py: Python<'_>) {
        let folder = self.inner.take(py);
        py.detach(|| folder.map(history::PrivateFolder::keep));
    }

    /// Delete the folder and its files, unless it was kept.
    fn discard(&self, py: Python<'_>) {
        let folder = self.inner.take(py);
        py.detach(|| drop(folder));
    }
}

fn parse_entry(entry: &str) -> PyResult<ManifestEntry> {
    // Parse a whole manifest: it refuses names that no checkpoint can have.
    let text = format!("{{\"version\": 2, \"checkpoints\": [{entry}]}}");
    let manifest = Manifest::parse(text.as_bytes()).map_err(InvalidArgumentError::new_err)?;
    manifest.checkpoints.into_iter().next().ok_or_else(|| InvalidArgumentError::new_err("this is not a checkpoint"))
}

fn settled_tuple(settled: Settled) -> SettledTuple {
    (settled.foreign, settled.failures, settled.placed, settled.gone)
}
