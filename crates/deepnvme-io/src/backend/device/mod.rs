//! GPUs of any vendor. `gpu` has the traits, and `opened` the GPUs that an engine has opened.
//!
//! Everything that moves bytes to and from GPUs (`copies`, `gpus`, the gate, the workers) uses these traits only. Only
//! [`open`] knows the implementations. `cuda` is the first. `gds` and `probe` use NVIDIA's own libraries directly.

pub(crate) mod cuda;
mod gpu;
mod opened;

use std::sync::Arc;

use deepnvme_mem::Device;

pub(crate) use self::gpu::{Gpu, GpuEvent, GpuStream, Registration, Rows};
pub(crate) use self::opened::OpenedGpus;
use crate::error::{Error, Result};

/// Opens the GPU of a device, with its vendor's library.
///
/// # Errors
/// `Unsupported` if there is no such library. `Device` if it refuses, usually because there is no such GPU.
pub(crate) fn open(device: Device) -> Result<Arc<dyn Gpu>> {
    match device {
        Device::Host => Err(Error::invalid("the host's memory is on no GPU; report this as a bug")),
        Device::Cuda { index } => Ok(Arc::new(cuda::CudaGpu::open(index)?)),
    }
}
