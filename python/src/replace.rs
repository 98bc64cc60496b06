//! Private files and folders, and atomic replacement of file sets, for the checkpoints that Python writes.

use std::ffi::OsString;
use std::path::PathBuf;

use deepnvme_file::replace::{self, Member, Retired};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::error;
use crate::path::file_name;
use crate::threads::UntilTaken;

/// Remove leftovers of killed writers of ``path``. Removes only unlocked private files and folders whose names prove
/// that they are ours.
#[pyfunction]
pub(crate) fn _remove_leftovers(path: &Bound<'_, PyAny>) -> PyResult<()> {
    let target = file_name(path)?;
    path.py().detach(|| {
        replace::remove_leftovers(&target);
        replace::remove_leftover_folders(&target);
    });
    Ok(())
}

/// A new folder under a private name. ``commit`` renames it to ``path``.
///
/// The private name proves its origin, and the folder is locked while this process lives. First, leftovers of killed
/// processes for the same ``path`` are removed: the files that each folder listed, and the folder if nothing else is in
/// it.
#[pyclass(frozen, name = "_PrivateFolder", module = "deepnvme._deepnvme")]
pub(crate) struct PrivateFolder {
    path: PathBuf,
    inner: UntilTaken<replace::PrivateFolder>,
}

#[pymethods]
impl PrivateFolder {
    #[new]
    fn new(path: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (py, target) = (path.py(), file_name(path)?);
        let folder = error::check(py, py.detach(|| replace::PrivateFolder::new(&target)))?;
        Ok(Self { path: folder.path().to_path_buf(), inner: UntilTaken::new(folder) })
    }

    /// The folder's private path.
    #[getter]
    fn path(&self) -> PathBuf {
        self.path.clone()
    }

    /// Register a file or folder of this relative name before it is created. Returns its path. Only registered entries
    /// are removed if the folder is not committed.
    fn add(&self, name: &Bound<'_, PyAny>) -> PyResult<PathBuf> {
        let (py, name) = (name.py(), file_name(name)?);
        let added = self.inner.with(py, |folder| folder.add(&name));
        error::check(py, added.ok_or_else(ended)?)
    }

    /// Rename the folder, and sync the new name. The name must be free or an empty folder. Its files are already
    /// synced.
    fn commit(&self, py: Python<'_>) -> PyResult<()> {
        let folder = self.inner.take(py).ok_or_else(ended)?;
        error::check(py, py.detach(|| folder.commit()))
    }

    /// Remove the folder and its registered files, unless it was committed.
    fn discard(&self, py: Python<'_>) {
        let folder = self.inner.take(py);
        py.detach(|| drop(folder));
    }
}

/// New files that atomically replace the files that an index lists.
///
/// ``members`` are pairs of a path prefix and a name suffix. One unguessable token goes between them, the same for all
/// files. The files are created empty, for the caller to write. ``record_at`` is the path of keys, in the JSON object,
/// to the record of files that the index owns, such as ``["metadata", "deepnvme.owned"]``.
///
/// If two processes replace one set at once, both succeed: one of the two indexes remains, with its files and no
/// others. Files that an index lists but did not record as its own are never removed.
#[pyclass(frozen, name = "_SetReplacement", module = "deepnvme._deepnvme")]
pub(crate) struct SetReplacement {
    members: Vec<PathBuf>,
    names: Vec<PathBuf>,
    inner: UntilTaken<replace::SetReplacement>,
}

#[pymethods]
impl SetReplacement {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "what Python gives is converted")]
    fn new(index: &Bound<'_, PyAny>, members: Vec<(PathBuf, OsString)>, record_at: Vec<String>) -> PyResult<Self> {
        let (py, index) = (index.py(), file_name(index)?);
        let members: Vec<Member> = members.into_iter().map(|(prefix, suffix)| Member { prefix, suffix }).collect();
        let record_at: Vec<&str> = record_at.iter().map(String::as_str).collect();
        let new = error::check(py, py.detach(|| replace::SetReplacement::begin(&index, &members, &record_at)))?;
        let (members, names) = (new.members().map(PathBuf::from).collect(), new.names().map(PathBuf::from).collect());
        Ok(Self { members, names, inner: UntilTaken::new(new) })
    }

    /// The new files, in order. They exist and are empty, and have private names until the commit.
    #[getter]
    fn members(&self) -> Vec<PathBuf> {
        self.members.clone()
    }

    /// The names that the new files get.
    #[getter]
    fn names(&self) -> Vec<PathBuf> {
        self.names.clone()
    }

    /// Commit the replacement: the index becomes this JSON object with the record of its own files, and the files that
    /// the old index recorded as its own are removed. The caller has already synced the new files as far as needed.
    /// Their names and the index are durable when this returns. The index gets a checksum.
    ///
    /// Returns the files that the old index listed and that stay: it did not record them as its own, or somebody has
    /// written to them.
    fn commit(&self, py: Python<'_>, index: &str) -> PyResult<Vec<PathBuf>> {
        let new = self.inner.take(py).ok_or_else(ended)?;
        error::check(py, py.detach(|| new.commit_text(index)))
    }

    /// Remove the new files, unless they were committed.
    fn discard(&self, py: Python<'_>) {
        let new = self.inner.take(py);
        py.detach(|| drop(new));
    }
}

/// Remove a set that one file has replaced: the index, then the files recorded as its own. Returns the
/// listed files that stay, or ``None`` if the index is not known to be ours, and stays.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "what Python gives is converted")]
pub(crate) fn _retire_set(index: &Bound<'_, PyAny>, record_at: Vec<String>) -> PyResult<Option<Vec<PathBuf>>> {
    let (py, index) = (index.py(), file_name(index)?);
    let record_at: Vec<&str> = record_at.iter().map(String::as_str).collect();
    let retired = py.detach(|| replace::retire_set(&index, &record_at));
    Ok(match error::check(py, retired)? {
        Retired::Absent => Some(Vec::new()),
        Retired::Removed { kept } => Some(kept),
        Retired::Foreign => None,
    })
}

fn ended() -> PyErr {
    PyRuntimeError::new_err("it was already committed or discarded; create another one")
}
