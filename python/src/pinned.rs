//! Pinned memory for `deepnvme.pinned_empty`, exported to torch as a DLPack capsule.

use deepnvme_io::known_to_driver;
use deepnvme_mem::Buffer;
use deepnvme_mem::dlpack::{self, DLDataType, DLManagedTensor};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::memory;

/// Allocate a DLPack capsule of `nbytes` page-aligned bytes, pinned if RLIMIT_MEMLOCK allows. The consumer frees
/// the memory by dropping the tensor.
#[pyfunction]
pub(crate) fn _pinned_capsule(py: Python<'_>, nbytes: usize) -> PyResult<Bound<'_, PyCapsule>> {
    // Locking touches every page, which takes time, and so does registering with the CUDA driver.
    let locked = || Buffer::locked(nbytes).map(|buffer| known_to_driver(buffer.into_region()));
    let memory = py.detach(locked).map_err(|error| {
        let errno = error.raw_os_error();
        PyOSError::new_err((errno, format!("{nbytes} bytes of memory are not to be had; ask for less")))
    })?;
    let tensor = dlpack::export::<DLManagedTensor>(memory, &[nbytes], DLDataType::U8)?;
    memory::capsule(py, tensor)
}
