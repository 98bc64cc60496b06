//! The GPUs that an engine has opened. Each is opened on first use.

use std::collections::HashMap;
use std::sync::Arc;

use deepnvme_mem::Device;

use super::cuda::{CudaGpu, cuda_device};
use super::device::Gpu;
use super::known_memory::register_all;
use crate::backend::gds::CudaDevices;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::{Mutex, lock};

/// The GPUs that an engine has opened.
#[derive(Debug, Default)]
pub(crate) struct GpuRegistry {
    gpus: Mutex<HashMap<Device, Arc<dyn Gpu>>>,
}

impl GpuRegistry {
    /// Creates a registry with an opened GPU.
    #[cfg(test)]
    pub(crate) fn with(device: Device, gpu: Arc<dyn Gpu>) -> Self {
        Self { gpus: Mutex::new(HashMap::from([(device, gpu)])) }
    }

    /// Returns the GPU of a device. Opens it first if needed, with its vendor's library.
    ///
    /// # Errors
    /// `Unsupported` if there is no such library, or after a fork. `Device` if the library refuses, usually because
    /// there is no such GPU.
    pub(crate) fn get(&self, device: Device) -> Result<Arc<dyn Gpu>> {
        let mut gpus = lock(&self.gpus);
        if let Some(gpu) = gpus.get(&device) {
            return Ok(Arc::clone(gpu));
        }
        let gpu = match device {
            Device::Host => return Err(Error::invalid("host memory is not on a GPU; report this as a bug")),
            Device::Cuda { index } => Arc::new(CudaGpu::open(index)?),
        };
        gpus.insert(device, Arc::<CudaGpu>::clone(&gpu));
        // Without the lock: to register gigabytes takes seconds.
        drop(gpus);
        register_all(gpu.device());
        Ok(gpu)
    }
}

impl CudaDevices for GpuRegistry {
    fn cuda_device(&self, index: u32) -> Result<Arc<deepnvme_cuda::Device>> {
        let gpu = self.get(Device::Cuda { index })?;
        let none = || {
            Error::new(
                ErrorKind::Unsupported,
                "use cuFile",
                "cuFile transfers memory of CUDA GPUs only; use gds=\"disabled\" for this GPU",
            )
        };
        cuda_device(&*gpu).cloned().ok_or_else(none)
    }
}
