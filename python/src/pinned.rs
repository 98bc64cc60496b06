//! Pinned memory for `deepnvme.pinned_empty`, exported to torch as a DLPack capsule.

use deepnvme_io::register_with_driver;
use deepnvme_mem::Buffer;
use deepnvme_mem::dlpack::{self, DLDataType, DLManagedTensor};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::{error, interruptible, memory};

/// Allocate a DLPack capsule of `nbytes` page-aligned bytes, pinned if RLIMIT_MEMLOCK allows. The consumer frees
/// the memory by dropping the tensor.
#[pyfunction]
pub(crate) fn _pinned_capsule(py: Python<'_>, nbytes: usize) -> PyResult<Bound<'_, PyCapsule>> {
    // Registering with the CUDA driver takes time as well.
    let locked = move || Buffer::locked(nbytes).map(|buffer| register_with_driver(buffer.into_region()));
    let refused = |error| {
        let detail = format!("the system has no {nbytes} bytes of memory; ask for less");
        deepnvme_io::Error::from_io("allocate pinned memory", &error).because(detail)
    };
    let memory = error::check(py, interruptible::allocate(py, nbytes, locked)?.map_err(refused))?;
    let tensor = dlpack::export::<DLManagedTensor>(memory, &[nbytes], DLDataType::U8)?;
    memory::capsule(py, tensor)
}
