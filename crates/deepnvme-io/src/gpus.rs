//! The GPUs that requests name, opened when the first one does.

use std::collections::HashMap;
use std::sync::Arc;

use deepnvme_cuda as cuda;
use deepnvme_mem::Device;

use crate::error::{Error, ErrorKind, Result};
use crate::sync::{Mutex, lock};

/// The GPUs of an engine.
#[derive(Debug, Default)]
pub(crate) struct Gpus {
    open: Mutex<HashMap<u32, Arc<cuda::Device>>>,
}

impl Gpus {
    /// The GPU of that number.
    pub(crate) fn get(&self, index: u32) -> Result<Arc<cuda::Device>> {
        let mut open = lock(&self.open);
        if let Some(device) = open.get(&index) {
            return Ok(Arc::clone(device));
        }
        let driver = cuda::Driver::get().map_err(|absent| {
            let detail = format!("the memory is on cuda:{index}, and {absent}");
            Error::new(ErrorKind::Unsupported, "use GPU memory", detail)
        })?;
        let device = Arc::new(cuda::Device::new(driver, index).map_err(|error| refused(&error))?);
        open.insert(index, Arc::clone(&device));
        Ok(device)
    }

    /// Points behind all that those streams have been given by now; of what is over already, none.
    pub(crate) fn points(&self, streams: &[(Device, usize)]) -> Result<Vec<cuda::Event>> {
        let mut points = Vec::new();
        for (device, stream) in streams {
            let Device::Cuda { index } = device else { continue };
            let event = cuda::Event::new(&self.get(*index)?).map_err(|error| refused(&error))?;
            event.record(cuda::RawStream(*stream)).map_err(|error| refused(&error))?;
            if !event.is_over().map_err(|error| refused(&error))? {
                points.push(event);
            }
        }
        Ok(points)
    }
}

/// What the driver refused.
pub(crate) fn refused(error: &cuda::Error) -> Error {
    let remedy = if error.is_out_of_memory() {
        "there is no memory that it could lock; lower the engine's pool (`workers`, `block_bytes`), or free some"
    } else {
        "if earlier work on the GPU has failed, this is how it shows: run with CUDA_LAUNCH_BLOCKING=1 to find it"
    };
    Error::new(ErrorKind::Device, "use GPU memory", format!("{error}; {remedy}"))
}
