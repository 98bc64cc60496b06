//! Private files and folders, and atomic replacement of file sets, for the checkpoints that Python writes.

use std::ffi::OsString;
use std::os::fd::{IntoRawFd, RawFd};
use std::path::PathBuf;

use deepnvme_file::replace::{self, Member, Retired};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

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

/// Read a regular file of at most ``max_nbytes``. A pipe, a device or a longer file is an error at once.
#[pyfunction]
pub(crate) fn _read_small_file<'py>(path: &Bound<'py, PyAny>, max_nbytes: u64) -> PyResult<Bound<'py, PyBytes>> {
    let (py, name) = (path.py(), file_name(path)?);
    let bytes = py.detach(|| deepnvme_io::fs::read_small(&name, max_nbytes));
    Ok(PyBytes::new(py, &error::check(py, bytes)?))
}

/// Open a regular file for reading. Returns its descriptor, which the caller owns. A pipe or a device is an error at
/// once.
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
    fn give_up(&self, py: Python<'_>) {
        let folder = self.inner.take(py);
        py.detach(|| drop(folder));
    }
}

/// New files that atomically replace the files that an index lists.
///
/// ``members`` are pairs of a path's beginning and a name's end. One unguessable token goes between them, the same for
/// all files. The files are created empty, for the caller to write. ``record_at`` lists the keys to the index's record
/// of its own files in the JSON object, such as ``["metadata", "deepnvme.owned"]``.
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
        let members: Vec<Member> = members.into_iter().map(|(before, after)| Member { before, after }).collect();
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
    fn give_up(&self, py: Python<'_>) {
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
    PyRuntimeError::new_err("this replacement was already committed or discarded; create another one")
}
