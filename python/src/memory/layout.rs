//! Where the bytes of an object lie, what is done with them, and whose they are.

use deepnvme_mem::{Device, StreamHandle, Strided};
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;

use super::resizable::Keep;

/// What a request does with the memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Use {
    /// A read fills it.
    Fill,
    /// A write takes its bytes.
    Take,
}

/// Where an object's bytes lie, and what keeps them there.
pub(crate) struct Layout {
    pub(crate) place: Place,
    pub(crate) address: usize,
    pub(crate) bytes: usize,
    /// `None` where they lie side by side.
    pub(crate) strided: Option<Strided>,
    pub(crate) keep: Keep,
}

/// Whose memory it is, and the CUDA stream whose work so far comes first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    pub(crate) device: Device,
    pub(crate) stream: StreamHandle,
}

impl Place {
    /// The processor's.
    pub(crate) const HOST: Self = Self { device: Device::Host, stream: StreamHandle::DEFAULT };
}

/// CUDA's default stream, as DLPack numbers it, and the driver.
pub(crate) const LEGACY_STREAM: StreamHandle = {
    // SAFETY: the driver knows the default stream by this number as well.
    unsafe { StreamHandle::from_raw(1) }
};

/// A `torch.cuda.Stream`.
pub(crate) fn stream(stream: &Bound<'_, PyAny>) -> PyResult<StreamHandle> {
    let handle = stream.getattr(intern!(stream.py(), "cuda_stream"))?.extract()?;
    // SAFETY: torch ends no stream of its own before the process ends, and has whoever gives it another one keep that.
    Ok(unsafe { StreamHandle::from_raw(handle) })
}

/// What is wrong with a layout.
#[expect(clippy::needless_pass_by_value, reason = "so that `map_err` takes it by name")]
pub(super) fn refusal(error: std::io::Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}
