//! Opened GPUs. Each is opened on first use.

use std::collections::HashMap;
use std::sync::Arc;

use deepnvme_mem::Device;

use super::gpu::Gpu;
use crate::error::Result;
use crate::sync::{Mutex, lock};

/// The GPUs that an engine has opened.
#[derive(Debug, Default)]
pub(crate) struct OpenedGpus {
    gpus: Mutex<HashMap<Device, Arc<dyn Gpu>>>,
}

impl OpenedGpus {
    /// Creates a table with an opened GPU.
    #[cfg(test)]
    pub(crate) fn with(device: Device, gpu: Arc<dyn Gpu>) -> Self {
        Self { gpus: Mutex::new(HashMap::from([(device, gpu)])) }
    }

    /// Returns the GPU of a device.
    pub(crate) fn get(&self, device: Device) -> Result<Arc<dyn Gpu>> {
        let mut gpus = lock(&self.gpus);
        if let Some(gpu) = gpus.get(&device) {
            return Ok(Arc::clone(gpu));
        }
        let gpu = super::open(device)?;
        gpus.insert(device, Arc::clone(&gpu));
        Ok(gpu)
    }
}
