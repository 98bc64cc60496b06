//! Address, device, access and owner of an object's bytes.

use deepnvme_mem::dlpack::{DLDevice, ExchangeApi};
use deepnvme_mem::{Device, StreamHandle, Strided};
use pyo3::prelude::*;

use super::held_storages::KeepAlive;
use crate::error::InvalidArgumentError;
use crate::once::intern;

/// Access of a request to the memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MemoryAccess {
    /// Write it: the request reads from a file.
    Write,
    /// Read it: the request writes to a file.
    Read,
}

/// Address, device and strides of an object's bytes, and the reference that keeps them in place.
pub(crate) struct Layout {
    pub(crate) device_stream: DeviceStream,
    pub(crate) address: usize,
    pub(crate) bytes: usize,
    /// `None` if the bytes are contiguous.
    pub(crate) strided: Option<Strided>,
    pub(crate) keep: KeepAlive,
}

/// The memory's device, and the CUDA stream to wait for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DeviceStream {
    pub(crate) device: Device,
    pub(crate) stream: StreamHandle,
}

impl DeviceStream {
    /// Host memory.
    pub(crate) const HOST: Self = Self { device: Device::Host, stream: StreamHandle::DEFAULT };
}

/// Returns a stream by its number, the result of torch's `_cuda_getCurrentRawStream`.
pub(crate) fn raw_stream(number: &Bound<'_, PyAny>) -> Option<StreamHandle> {
    let handle = number.extract().ok()?;
    // SAFETY: the only caller passes the result of `_cuda_getCurrentRawStream`. torch keeps its own streams until the
    // process ends. The user keeps external streams alive, as torch requires.
    Some(unsafe { StreamHandle::from_raw(handle) })
}

/// Returns a CUDA GPU, and torch's current stream of this thread there, with one C call. `None` if torch reports none.
/// The caller has checked that `device` is CUDA.
pub(crate) fn device_stream_of(api: &ExchangeApi, device: DLDevice, py: Python<'_>) -> Option<DeviceStream> {
    let index = u32::try_from(device.device_id).ok()?;
    // SAFETY: torch requires the GIL, which `py` proves.
    let Some(handle) = (unsafe { api.current_work_stream(device) }) else {
        drop(PyErr::take(py));
        return None;
    };
    // SAFETY: torch returned the handle of its current stream. torch keeps its own streams until the process ends. The
    // user keeps external streams alive, as torch requires.
    let stream = unsafe { StreamHandle::from_raw(handle) };
    Some(DeviceStream { device: Device::Cuda { index }, stream })
}

/// CUDA's default stream, by the number that DLPack and the driver use.
pub(crate) const LEGACY_STREAM: StreamHandle = {
    // SAFETY: the driver accepts this number for the default stream.
    unsafe { StreamHandle::from_raw(1) }
};

/// Returns the handle of a `torch.cuda.Stream`.
pub(crate) fn stream(stream: &Bound<'_, PyAny>) -> PyResult<StreamHandle> {
    let handle = stream.getattr(intern!(stream.py(), "cuda_stream"))?.extract()?;
    // SAFETY: both callers pass a `torch.cuda.Stream`: the current one, or the one that deepnvme's Python code releases
    // a group on. torch keeps its own streams until the process ends. The user keeps external streams alive, as torch
    // requires.
    Ok(unsafe { StreamHandle::from_raw(handle) })
}

/// Converts a layout error to a `ValueError`.
#[expect(clippy::needless_pass_by_value, reason = "so that `map_err` takes it by name")]
pub(super) fn to_value_error(error: std::io::Error) -> PyErr {
    InvalidArgumentError::new_err(error.to_string())
}
