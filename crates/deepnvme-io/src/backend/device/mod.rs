//! GPUs, whoever makes them. `gpu` has the traits of one, `opened` those that an engine has opened.
//!
//! Everything that moves bytes to and from GPUs (`copies`, `gpus`, the gate, the workers) knows these traits only; [`open`] alone
//! knows which implementations there are. `cuda` is the first. `gds` and `probe` speak of NVIDIA's own libraries, and go past this.

pub(crate) mod cuda;
mod gpu;
mod opened;

use std::sync::Arc;

use deepnvme_mem::Device;

pub(crate) use self::gpu::{Gpu, GpuEvent, GpuStream, Registration, Rows};
pub(crate) use self::opened::OpenedGpus;
use crate::error::{Error, Result};

/// The GPU with that memory, by way of the library of its maker.
///
/// # Errors
/// `Unsupported` where there is no such library, `Device` where it refuses, above all since there is no such GPU.
pub(crate) fn open(device: Device) -> Result<Arc<dyn Gpu>> {
    match device {
        Device::Host => Err(Error::invalid("the host's memory is on no GPU; report this as a bug")),
        Device::Cuda { index } => Ok(Arc::new(cuda::CudaGpu::open(index)?)),
    }
}
