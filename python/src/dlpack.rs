//! Find the memory of objects that support only DLPack.

use deepnvme_mem::StreamHandle;
use deepnvme_mem::dlpack::{DLDevice, DLManagedTensor, DLManagedTensorVersioned, Imported, Managed};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::error::InvalidArgumentError;
use crate::memory::{self, MemoryAccess};
use crate::once::intern;

/// The newest supported DLPack version. The producer may answer with an older one.
const MAX_VERSION: (u32, u32) = (1, 1);

/// Imports the tensor of an object with `__dlpack__`, and the CUDA stream on which it is ready; `None` for anything
/// else.
pub(crate) fn tensor(object: &Bound<'_, PyAny>, access: MemoryAccess) -> PyResult<Option<(Imported, StreamHandle)>> {
    let py = object.py();
    let Ok(produce) = object.getattr(intern!(py, "__dlpack__")) else { return Ok(None) };
    let on_gpu = is_on_gpu(object)?;
    let capsule = newest(&produce, access, on_gpu)?.cast_into::<PyCapsule>()?;
    let imported = if memory::has_name(&capsule, DLManagedTensorVersioned::CAPSULE_NAME) {
        memory::take::<DLManagedTensorVersioned>(&capsule)
    } else {
        memory::take::<DLManagedTensor>(&capsule)
    }?;
    if access == MemoryAccess::Write && imported.is_read_only() {
        return Err(InvalidArgumentError::new_err(format!(
            "this {} is read-only, so nothing can be read into it; use a writable tensor",
            object.get_type().name()?
        )));
    }
    Ok(Some((imported, if on_gpu { memory::LEGACY_STREAM } else { StreamHandle::DEFAULT })))
}

fn is_on_gpu(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = object.py();
    let (kind, index): (i32, i32) = object.call_method0(intern!(py, "__dlpack_device__"))?.extract()?;
    match kind {
        DLDevice::CPU | DLDevice::CUDA_HOST => Ok(false),
        DLDevice::CUDA => Ok(true),
        _ => Err(PyTypeError::new_err(format!(
            "this {} is on DLPack device type {kind}, number {index}, and deepnvme moves host memory and that of CUDA \
             devices; copy it to the CPU first",
            object.get_type().name()?
        ))),
    }
}

/// Requests the newest form, which can state that it is read-only, and no copy of a tensor to fill. Producers before
/// DLPack 1.0 take no such arguments.
fn newest<'py>(produce: &Bound<'py, PyAny>, access: MemoryAccess, on_gpu: bool) -> PyResult<Bound<'py, PyAny>> {
    let py = produce.py();
    let (arguments, older) = (PyDict::new(py), PyDict::new(py));
    if on_gpu {
        arguments.set_item(intern!(py, "stream"), memory::LEGACY_STREAM.as_raw())?;
        older.set_item(intern!(py, "stream"), memory::LEGACY_STREAM.as_raw())?;
    }
    arguments.set_item(intern!(py, "max_version"), MAX_VERSION)?;
    if access == MemoryAccess::Write {
        arguments.set_item(intern!(py, "copy"), false)?;
    }
    match produce.call((), Some(&arguments)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => produce.call((), Some(&older)),
        answer => answer,
    }
}
