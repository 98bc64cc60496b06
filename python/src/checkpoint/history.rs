//! The folder of a `Checkpointer`, for `deepnvme._checkpoint.history`. What a manifest says passes as its own text.

use std::path::PathBuf;

use deepnvme_checkpoint::history::{self, Entry, History, Manifest, Settled};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::new_file::{NewFile, over};
use super::raise;
use crate::error;
use crate::threads::Ending;

/// What was settled: names of somebody else's files, failures, checkpoints with their names, retired ones that are gone.
type SettledAnswer = (Vec<String>, Vec<String>, Vec<String>, Vec<String>);

/// A folder of checkpoints, as one process sees it. Each method is one step that no signal handler runs inside of.
#[pyclass(frozen, name = "_History", module = "deepnvme._deepnvme")]
pub(crate) struct PyHistory {
    inner: History,
}

#[pymethods]
impl PyHistory {
    #[new]
    #[pyo3(signature = (folder, keep, synced))]
    fn new(folder: PathBuf, keep: Option<usize>, synced: bool) -> Self {
        Self { inner: History::new(folder, keep, synced) }
    }

    /// Makes the folder.
    fn make(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.inner.make()).map_err(|failure| raise(py, &failure))
    }

    /// Reads the manifest: its text, without checkpoints that are not there.
    fn read(&self, py: Python<'_>) -> PyResult<String> {
        py.detach(|| self.inner.read().map(|manifest| manifest.text())).map_err(|failure| raise(py, &failure))
    }

    /// Step and file of the checkpoints that the last ``read`` left out: the manifest lists them, and they are not there.
    #[getter]
    fn missing(&self) -> Vec<(u64, String)> {
        self.inner.missing()
    }

    /// What this process knows of it.
    #[getter]
    fn text(&self, py: Python<'_>) -> String {
        py.detach(|| self.inner.manifest().text())
    }

    /// Takes over what the leader knows.
    fn follow(&self, text: &str) -> PyResult<()> {
        self.inner.follow(Manifest::parse(text.as_bytes()).map_err(PyValueError::new_err)?);
        Ok(())
    }

    /// Takes the lock, for somebody of that name; the names of checkpoints that are in no list, and whether the file
    /// system has no locks.
    fn claim(&self, py: Python<'_>, name: String, token: String, is_leader: bool) -> PyResult<(Vec<String>, bool)> {
        let holder = history::Holder::new(name, token);
        let claimed = py.detach(|| self.inner.claim(&holder, is_leader));
        claimed.map(|claim| (claim.unlisted, claim.is_unlocked)).map_err(|failure| raise(py, &failure))
    }

    /// Whether this process holds the lock.
    #[getter]
    fn is_claimed(&self) -> bool {
        self.inner.is_claimed()
    }

    /// Lets go of the lock.
    fn release(&self, py: Python<'_>) {
        py.detach(|| self.inner.release());
    }

    /// Closes the lock's file in a forked child.
    fn abandon(&self) {
        self.inner.abandon();
    }

    /// Names in the folder that belong to that step.
    fn names_of(&self, py: Python<'_>, step: u64) -> PyResult<Vec<String>> {
        py.detach(|| self.inner.names_of(step)).map_err(|failure| raise(py, &failure))
    }

    /// A name that no file has, here or among ``taken``.
    #[expect(clippy::needless_pass_by_value, reason = "what Python gives is converted")]
    fn reserve(&self, py: Python<'_>, step: u64, suffix: &str, taken: Vec<String>) -> PyResult<String> {
        py.detach(|| self.inner.reserve(step, suffix, &taken)).map_err(|failure| raise(py, &failure))
    }

    /// Gives a reserved name back.
    fn free(&self, name: &str) {
        self.inner.free(name);
    }

    /// Has a checkpoint count, gives its file the name, and removes what was retired.
    fn commit(&self, py: Python<'_>, entry: &str, new: &Bound<'_, NewFile>) -> PyResult<SettledAnswer> {
        let entry = parsed(entry)?;
        let Some(replacement) = new.get().take(py) else { return Err(over()) };
        let committed = py.detach(|| self.inner.commit(entry, Some(replacement)));
        committed.map(answer).map_err(|failure| raise(py, &failure))
    }

    /// Has a checkpoint count whose files have private names.
    fn publish(&self, py: Python<'_>, entry: &str) -> PyResult<()> {
        let entry = parsed(entry)?;
        py.detach(|| self.inner.publish(&entry)).map_err(|failure| raise(py, &failure))
    }

    /// Whether the manifest on the disk lists that file; ``None`` where it cannot be read.
    fn counts(&self, py: Python<'_>, file: &str) -> Option<bool> {
        py.detach(|| self.inner.counts(file))
    }

    /// Gives files here their names, and removes what was retired.
    fn settle(&self, py: Python<'_>) -> SettledAnswer {
        answer(py.detach(|| self.inner.settle()))
    }

    /// Takes note of checkpoints that have their names, and of retired ones that are gone, on all machines.
    #[expect(clippy::needless_pass_by_value, reason = "what Python gives is converted")]
    fn note(&self, placed: Vec<String>, gone: Vec<String>) {
        self.inner.note(&placed, &gone);
    }
}

/// Where the files of the checkpoints lie that a manifest lists, in its order.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "what Python gives is converted")]
pub(crate) fn _places_of(py: Python<'_>, folder: PathBuf, text: &str) -> PyResult<Vec<PathBuf>> {
    let manifest = Manifest::parse(text.as_bytes()).map_err(PyValueError::new_err)?;
    let place = |entry: &Entry| history::place_of(&folder, &entry.file, entry);
    Ok(py.detach(|| manifest.checkpoints.iter().map(place).collect()))
}

/// A folder that has a private name, and vanishes unless it is kept.
#[pyclass(frozen, name = "_NewFolder", module = "deepnvme._deepnvme")]
pub(crate) struct NewFolder {
    path: PathBuf,
    inner: Ending<history::PrivateFolder>,
}

#[pymethods]
impl NewFolder {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "what Python gives is converted")]
    fn new(py: Python<'_>, parent: PathBuf, name: &str) -> PyResult<Self> {
        let made = py.detach(|| history::PrivateFolder::new(&parent, name));
        let folder = error::check(py, made)?;
        Ok(Self { path: folder.path().to_path_buf(), inner: Ending::new(folder) })
    }

    /// Where it is.
    #[getter]
    fn path(&self) -> PathBuf {
        self.path.clone()
    }

    /// Has it stay, under whatever name it has.
    fn keep(&self, py: Python<'_>) {
        let folder = self.inner.take(py);
        py.detach(|| folder.map(history::PrivateFolder::keep));
    }

    /// Removes it with the files in it, unless it was kept.
    fn give_up(&self, py: Python<'_>) {
        let folder = self.inner.take(py);
        py.detach(|| drop(folder));
    }
}

fn parsed(entry: &str) -> PyResult<Entry> {
    // Through a whole manifest, which refuses names that no checkpoint has.
    let text = format!("{{\"version\": 2, \"checkpoints\": [{entry}]}}");
    let manifest = Manifest::parse(text.as_bytes()).map_err(PyValueError::new_err)?;
    manifest.checkpoints.into_iter().next().ok_or_else(|| PyValueError::new_err("this is no checkpoint"))
}

fn answer(settled: Settled) -> SettledAnswer {
    (settled.foreign, settled.failures, settled.placed, settled.gone)
}
