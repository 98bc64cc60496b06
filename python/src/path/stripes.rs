//! `deepnvme.StripeSet`: one logical file over several, one per drive.

use std::path::PathBuf;

use deepnvme_file::stripe_set::{STRIPE_BYTES_DEFAULT, STRIPE_BYTES_MAX, STRIPE_BYTES_MIN};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString, PyTuple};

use super::file_name::file_name;
use crate::{error, settings};

/// One logical file striped over several part files, as RAID-0 stripes disks.
///
/// It adds up the bandwidth of several drives without RAID. ``read``, ``write``, ``open``, ``save``, ``load`` and
/// others accept a stripe set as a path.
///
/// The first write creates a manifest next to the first part, ``<first part>.stripes.json``. You can pass the
/// manifest's path instead of the set to ``read``, ``write`` and ``load``, and to ``open`` for reading.
///
/// Args:
///     paths: the part files in order, one per drive, 1 to 4096. Their folders must exist.
///     stripe_bytes: bytes of one part before the next part follows, a multiple of 4096, or text such as ``"1MiB"``.
///         Default 1 MiB.
///
/// Raises:
///     ValueError: no part, too many, a duplicate, or ``stripe_bytes`` out of range.
///
/// Example:
///     >>> parts = deepnvme.StripeSet(["disk0.part", "disk1.part"], stripe_bytes=4096)
///     >>> deepnvme.write(torch.ones(2048), parts)
///     8192
///     >>> deepnvme.read(torch.empty(2048), parts)
///     8192
#[pyclass(frozen, eq, hash, module = "deepnvme")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct StripeSet(deepnvme_file::StripeSet);

#[pymethods]
impl StripeSet {
    #[new]
    #[pyo3(signature = (paths, *, stripe_bytes=None), text_signature = "(paths, *, stripe_bytes=1048576)")]
    fn new(paths: &Bound<'_, PyAny>, stripe_bytes: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let stripe_bytes = settings::size("stripe_bytes", stripe_bytes, &(STRIPE_BYTES_MIN..=STRIPE_BYTES_MAX))?
            .unwrap_or(STRIPE_BYTES_DEFAULT);
        if paths.is_instance_of::<PyString>() || paths.is_instance_of::<PyBytes>() {
            return Err(PyTypeError::new_err("paths is one path; it must be a list of them, one for each drive"));
        }
        let parts = paths.try_iter()?.map(|part| file_name(&part?)).collect::<PyResult<Vec<PathBuf>>>()?;
        error::check(paths.py(), deepnvme_file::StripeSet::new(parts, stripe_bytes)).map(Self)
    }

    /// Load the set of a manifest. A save to it replaces the files of that manifest.
    ///
    /// Args:
    ///     path: the manifest, ``<first part>.stripes.json``.
    ///
    /// Returns:
    ///     The set that was written last.
    ///
    /// Raises:
    ///     FileNotFoundError: the manifest does not exist.
    ///     deepnvme.errors.CorruptFileError: the file is not a manifest, or differs from its checksum.
    ///
    /// Example:
    ///     >>> parts = deepnvme.StripeSet(["disk0.part", "disk1.part"])
    ///     >>> deepnvme.write(torch.ones(1024), parts)
    ///     4096
    ///     >>> deepnvme.StripeSet.from_manifest(parts.manifest_path).stripe_bytes
    ///     1048576
    #[staticmethod]
    #[pyo3(signature = (path))]
    fn from_manifest(path: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = path.py();
        let path = file_name(path)?;
        let set = py.detach(|| deepnvme_file::StripeSet::from_manifest(&path));
        error::check(py, set).map(Self)
    }

    /// The part files, in order.
    #[getter]
    fn paths<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.parts().iter().map(|part| part.as_os_str()))
    }

    /// Bytes of one part before the next part follows. Default 1 MiB.
    #[getter]
    fn stripe_bytes(&self) -> u64 {
        self.0.stripe_bytes()
    }

    /// Path of the manifest.
    #[getter]
    fn manifest_path(&self) -> std::ffi::OsString {
        self.0.manifest_path().into_os_string()
    }

    /// Internal: return the text of a manifest that names the parts as this set does.
    fn _manifest_text(&self, py: Python<'_>) -> PyResult<String> {
        error::check(py, self.0.to_list())
    }

    /// Internal: make the set of a pickle.
    #[staticmethod]
    fn _unpickle(
        paths: &Bound<'_, PyAny>,
        stripe_bytes: &Bound<'_, PyAny>,
        manifest: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let set = Self::new(paths, Some(stripe_bytes))?.0;
        Ok(Self(set.listed_by(file_name(manifest)?)))
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let state = (self.paths(py)?, self.stripe_bytes(), self.manifest_path()).into_pyobject(py)?;
        Ok((py.get_type::<Self>().getattr("_unpickle")?, state))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let paths = self.0.parts().iter().map(|part| part.as_os_str());
        let paths = pyo3::types::PyList::new(py, paths)?.repr()?;
        Ok(format!("StripeSet({paths}, stripe_bytes={})", self.stripe_bytes()))
    }
}

impl StripeSet {
    pub(crate) fn set(&self) -> &deepnvme_file::StripeSet {
        &self.0
    }
}
