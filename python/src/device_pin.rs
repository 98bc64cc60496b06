//! Register GPU memory with cuFile without keeping its tensor alive.

use deepnvme_io::GpuRegistration;
use pyo3::prelude::*;

use crate::engine::PyEngine;
use crate::{error, tensor_memory};

/// A cuFile registration, which ends with this object. It must end before the tensor's memory does.
#[pyclass(frozen, name = "_DevicePin", module = "deepnvme")]
pub(crate) struct DevicePin(GpuRegistration);

#[pymethods]
impl DevicePin {
    /// Why cuFile refused the memory; ``None`` if it is registered.
    #[getter]
    fn refusal(&self) -> Option<String> {
        self.0.refusal()
    }
}

/// Register a contiguous CUDA tensor's memory, if cuFile can use it directly. The caller drops the registration before
/// the tensor's storage dies: nothing here keeps the storage alive.
#[pyfunction]
pub(crate) fn _pin_device(py: Python<'_>, engine: &PyEngine, tensor: &Bound<'_, PyAny>) -> PyResult<DevicePin> {
    let (engine, memory) = (engine.open_engine(py)?, tensor_memory::unowned(tensor)?);
    let pin = py.detach(|| engine.register_gpu_memory(memory));
    error::check(py, pin).map(DevicePin)
}
