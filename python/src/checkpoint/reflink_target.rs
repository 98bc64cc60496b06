//! A safetensors file whose tensors a swapper writes in place.

use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;

use deepnvme_checkpoint::Progress;
use deepnvme_checkpoint::read::refuse_list_name;
use deepnvme_checkpoint::write::ReflinkTarget;
use deepnvme_file::Target;
use deepnvme_format::Dtype;
use deepnvme_format::safetensors::TensorSpec;
use pyo3::prelude::*;

use super::new_file::already_taken;
use super::to_exception;
use crate::error::InvalidArgumentError;
use crate::path::file_name;
use crate::threads::UntilTaken;
use crate::{default, interruptible};

/// A new safetensors file under a private name. ``commit`` renames it to ``path``; otherwise it is deleted.
///
/// ``tensors`` lists names, torch's type names, and element counts. The tensors are contiguous, starting at
/// ``data_offset``. The caller writes their bytes through the descriptor.
#[pyclass(frozen, name = "_ReflinkTarget", module = "deepnvme._deepnvme")]
pub(crate) struct PyReflinkTarget {
    data_offset: u64,
    private_path: PathBuf,
    inner: UntilTaken<ReflinkTarget>,
}

#[pymethods]
impl PyReflinkTarget {
    #[new]
    fn new(
        path: &Bound<'_, PyAny>,
        tensors: Vec<(String, String, u64)>,
        metadata: Vec<(String, String)>,
        checksums: bool,
    ) -> PyResult<Self> {
        let py = path.py();
        let (path, engine) = (Target::Path(file_name(path)?), default::or_default(py, None)?);
        let spec = |(name, dtype, count): (String, String, u64)| match Dtype::from_torch(&dtype) {
            Some(dtype) => Ok(TensorSpec { name, dtype, shape: vec![count] }),
            None => Err(InvalidArgumentError::new_err(format!("{name:?}: torch.{dtype} is not known"))),
        };
        let specs = tensors.into_iter().map(spec).collect::<PyResult<Vec<_>>>()?;
        let make = || {
            refuse_list_name(&path.path())?;
            ReflinkTarget::new(engine, &path, specs, metadata, checksums)
        };
        let target = py.detach(make).map_err(|error| to_exception(py, &error))?;
        let (data_offset, private_path) = (target.data_offset(), target.private_path());
        Ok(Self { data_offset, private_path, inner: UntilTaken::new(target) })
    }

    /// Offset of the first tensor.
    #[getter]
    fn data_offset(&self) -> u64 {
        self.data_offset
    }

    /// The file's name until it is committed, which errors of writes may state.
    #[getter]
    fn private_path(&self) -> String {
        self.private_path.to_string_lossy().into_owned()
    }

    /// Return the file's descriptor, until it is committed or discarded.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        self.inner.with(py, |target| target.descriptor().as_raw_fd()).ok_or_else(already_taken)
    }

    /// Read the tensors for their checksums, if it has any. Write the header, sync the file, and rename it to its final
    /// name.
    fn commit(&self, py: Python<'_>) -> PyResult<()> {
        let target = self.inner.take(py).ok_or_else(already_taken)?;
        let progress = Arc::new(Progress::default());
        let seen = Arc::clone(&progress);
        let stop = || progress.stop();
        let committed = interruptible::run_polling(py, move || target.commit(&seen), &mut || Ok(()), &stop, None)?;
        committed.map_err(|error| to_exception(py, &error))
    }

    /// Delete the file unless it was committed.
    fn discard(&self, py: Python<'_>) {
        let target = self.inner.take(py);
        py.detach(|| drop(target));
    }
}
