//! Private files and folders, and sets of files that are replaced at once, for the checkpoints that Python puts together.

use std::ffi::OsString;
use std::os::fd::{IntoRawFd, RawFd};
use std::path::PathBuf;

use deepnvme_file::replace::{self, Member, Retired};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error;
use crate::path::file_name;
use crate::threads::Ending;

/// Removes what killed writers have left of files and folders called ``path``: private ones whose names prove that they
/// are, and that nobody has locked.
#[pyfunction]
pub(crate) fn _remove_stale(path: &Bound<'_, PyAny>) -> PyResult<()> {
    let target = file_name(path)?;
    path.py().detach(|| {
        replace::remove_stale(&target);
        replace::remove_stale_folders(&target);
    });
    Ok(())
}

/// All bytes of a regular file of at most ``max_nbytes``. A pipe, a device or a longer file is an error at once.
#[pyfunction]
pub(crate) fn _read_small_file<'py>(path: &Bound<'py, PyAny>, max_nbytes: u64) -> PyResult<Bound<'py, PyBytes>> {
    let (py, name) = (path.py(), file_name(path)?);
    let bytes = py.detach(|| deepnvme_io::fs::read_small(&name, max_nbytes));
    Ok(PyBytes::new(py, &error::check(py, bytes)?))
}

/// Opens a regular file for reading: its descriptor, which is the caller's. A pipe or a device is an error at once.
#[pyfunction]
pub(crate) fn _open_regular(path: &Bound<'_, PyAny>) -> PyResult<RawFd> {
    let (py, name) = (path.py(), file_name(path)?);
    let opened = py.detach(|| deepnvme_io::fs::open_regular(&name));
    Ok(error::check(py, opened)?.into_raw_fd())
}

/// Makes a folder and those above it that are missing.
#[pyfunction]
pub(crate) fn _make_folders(path: &Bound<'_, PyAny>) -> PyResult<()> {
    let (py, name) = (path.py(), file_name(path)?);
    let made = py.detach(|| deepnvme_io::fs::make_folders(&name));
    error::check(py, made.map_err(|errno| deepnvme_io::Error::os("make folder", errno).at_path(name)))
}

/// A new folder under a private name, which becomes ``path`` when it is committed.
///
/// The private name proves what it is, and the folder is locked while this process lives. First, what killed processes left
/// of earlier ones for the same ``path`` is removed: the files that each listed, and the folder if nothing else is in it.
#[pyclass(frozen, name = "_PrivateFolder", module = "deepnvme._deepnvme")]
pub(crate) struct PrivateFolder {
    path: PathBuf,
    inner: Ending<replace::PrivateFolder>,
}

#[pymethods]
impl PrivateFolder {
    #[new]
    fn new(path: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (py, target) = (path.py(), file_name(path)?);
        let folder = error::check(py, py.detach(|| replace::PrivateFolder::new(&target)))?;
        Ok(Self { path: folder.path().to_path_buf(), inner: Ending::new(folder) })
    }

    /// Its name for now.
    #[getter]
    fn path(&self) -> PathBuf {
        self.path.clone()
    }

    /// Writes down that a file, or a folder, of that relative name will be made in it; its path. Only what was added is
    /// removed if the folder does not come to be.
    fn add(&self, name: &Bound<'_, PyAny>) -> PyResult<PathBuf> {
        let (py, name) = (name.py(), file_name(name)?);
        let added = self.inner.with(py, |folder| folder.add(&name));
        error::check(py, added.ok_or_else(ended)?)
    }

    /// Gives it its name, which must be free (or an empty folder), and waits until that is on the disk. The files in it have been synced.
    fn commit(&self, py: Python<'_>) -> PyResult<()> {
        let folder = self.inner.take(py).ok_or_else(ended)?;
        error::check(py, py.detach(|| folder.commit()))
    }

    /// Removes it with the files that were added, unless it has its name.
    fn give_up(&self, py: Python<'_>) {
        let folder = self.inner.take(py);
        py.detach(|| drop(folder));
    }
}

/// New files that an index will list, in place of those that it lists now: all of them at once.
///
/// ``members`` are pairs of the beginning of a path and the end of a name. A token that nobody can guess goes between, the
/// same in all of them. The files are made, empty, and are to be written to. ``record_at`` are the keys that lead to
/// where the index, a JSON object, gets the record of its own files, as ``["metadata", "deepnvme.owned"]``.
///
/// Two who replace one set at once both succeed: one of the two indexes is there afterwards, with its files and no others.
/// Files that an index lists and did not record as its own are never removed.
#[pyclass(frozen, name = "_SetReplacement", module = "deepnvme._deepnvme")]
pub(crate) struct SetReplacement {
    members: Vec<PathBuf>,
    inner: Ending<replace::SetReplacement>,
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
        Ok(Self { members: new.members().map(PathBuf::from).collect(), inner: Ending::new(new) })
    }

    /// The new files, in their order: they are there, and empty.
    #[getter]
    fn members(&self) -> Vec<PathBuf> {
        self.members.clone()
    }

    /// Makes the change: the index becomes this JSON object with the record of its own files added, and the old files that
    /// the old index recorded as its own are removed. The caller has synced the bytes of the new files as far as they must
    /// last; their names and the index are on the disk when this returns. A blank checksum in the index is
    /// filled in.
    ///
    /// Returns the files that the old index listed and did not record as its own: they stay.
    fn commit(&self, py: Python<'_>, index: &str) -> PyResult<Vec<PathBuf>> {
        let new = self.inner.take(py).ok_or_else(ended)?;
        error::check(py, py.detach(|| new.commit_text(index, sealed)))
    }

    /// Removes the new files, unless they are committed.
    fn give_up(&self, py: Python<'_>) {
        let new = self.inner.take(py);
        py.detach(|| drop(new));
    }
}

/// Removes a set that one file has taken the place of: the index, then the files that it recorded as its own. What became of
/// it: ``"absent"``, ``"removed"``, or ``"foreign"`` where the index is not known to be ours, and stays.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "what Python gives is converted")]
pub(crate) fn _retire_set(index: &Bound<'_, PyAny>, record_at: Vec<String>) -> PyResult<&'static str> {
    let (py, index) = (index.py(), file_name(index)?);
    let record_at: Vec<&str> = record_at.iter().map(String::as_str).collect();
    let retired = py.detach(|| replace::retire_set(&index, &record_at));
    Ok(match error::check(py, retired)? {
        Retired::Absent => "absent",
        Retired::Removed => "removed",
        Retired::Foreign => "foreign",
    })
}

/// The text with its checksum, where it has a place for one.
fn sealed(text: String) -> deepnvme_io::Result<String> {
    if !text.contains(deepnvme_format::set::BLANK) {
        return Ok(text);
    }
    deepnvme_format::set::seal(&text).map_err(|error| deepnvme_io::Error::invalid(error.to_string()))
}

fn ended() -> PyErr {
    PyRuntimeError::new_err("it was committed, or given up")
}
