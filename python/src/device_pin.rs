//! Memory of GPUs that cuFile is told of: a registration that does not keep its tensor.

use deepnvme_io::GpuPin;
use pyo3::prelude::*;

use crate::engine::PyEngine;
use crate::{error, memory};

/// A registration with cuFile, which ends with this object. It must end before the tensor's memory does.
#[pyclass(frozen, name = "_DevicePin", module = "deepnvme")]
pub(crate) struct DevicePin(GpuPin);

#[pymethods]
impl DevicePin {
    /// Why cuFile does not know the memory; ``None`` while it does.
    #[getter]
    fn refusal(&self) -> Option<String> {
        self.0.refusal()
    }
}

/// Registers the memory of a contiguous tensor on a GPU, where cuFile takes the short way. Whoever asks gives the answer up
/// before the tensor's storage dies: nothing here keeps it.
#[pyfunction]
pub(crate) fn _pin_device(py: Python<'_>, engine: &PyEngine, tensor: &Bound<'_, PyAny>) -> PyResult<DevicePin> {
    let (engine, memory) = (engine.open_engine(py)?, memory::unowned(tensor)?);
    let pin = py.detach(|| engine.pin_gpu_memory(memory));
    error::check(py, pin).map(DevicePin)
}
