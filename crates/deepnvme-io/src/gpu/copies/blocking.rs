//! Blocking copies from and to one GPU.
#![allow(unsafe_code)]

use std::sync::Arc;

use deepnvme_mem::Region;

use super::slice::{GpuSlice, launch};
use crate::error::Result;
use crate::gpu::device::{Gpu, GpuStream};
use crate::op::Direction;

/// Copies from and to one GPU, and waits until the copies are done.
#[derive(Debug)]
pub(crate) struct BlockingCopier {
    gpu: Arc<dyn Gpu>,
    stream: Box<dyn GpuStream>,
}

impl BlockingCopier {
    pub(crate) fn new(gpu: Arc<dyn Gpu>) -> Result<Self> {
        let stream = gpu.new_stream()?;
        Ok(Self { gpu, stream })
    }

    /// Returns the index of its GPU.
    pub(crate) fn index(&self) -> u32 {
        self.gpu.index()
    }

    /// Copies slices to host memory for a write, or from it for a read, and waits until all are done. The caller
    /// ensures that nothing else uses the host memory meanwhile.
    pub(crate) fn copy(&self, direction: Direction, host: &Region, slices: &[GpuSlice]) -> Result<()> {
        let outcome = slices.iter().try_for_each(|slice| {
            // SAFETY: both ends are borrowed for this call. It waits for the whole stream, and if that fails, nothing
            // runs in the stream any more, as `synchronise` promises. The caller of `copy` ensures that nothing else
            // uses the host memory, and callers of the engine order the accesses to the same GPU memory.
            unsafe { launch(&*self.stream, direction, host, slice) }
        });
        outcome.and(self.stream.synchronise())
    }
}
