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
    stream: Box<dyn GpuStream>,
}

impl BlockingCopier {
    pub(crate) fn new(gpu: &Arc<dyn Gpu>) -> Result<Self> {
        Ok(Self { stream: gpu.new_stream()? })
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

    /// Starts to copy a slice as [`copy`](Self::copy) does. Until the copy is done, nothing else may change the source or
    /// use the target.
    pub(crate) fn start(self, direction: Direction, host: Region, slice: GpuSlice) -> Result<CopyInFlight> {
        let copy = CopyInFlight { copier: Some(self), host, slice };
        if let Some(copier) = &copy.copier {
            // SAFETY: the result keeps both ends, and waits for the whole stream before it drops them. If that fails,
            // nothing runs in the stream any more. The callers ensure that nothing else changes the source or uses the
            // target.
            unsafe { launch(&*copier.stream, direction, &copy.host, &copy.slice) }?;
        }
        Ok(copy)
    }
}

/// A copy in flight. Dropping it waits until it is done.
#[derive(Debug)]
pub(crate) struct CopyInFlight {
    /// `None` once it is done.
    copier: Option<BlockingCopier>,
    host: Region,
    slice: GpuSlice,
}

impl CopyInFlight {
    /// Waits until it is done, and returns the copier.
    pub(crate) fn wait(mut self) -> Result<Option<BlockingCopier>> {
        let copier = self.copier.take();
        if let Some(copier) = &copier {
            copier.stream.synchronise()?;
        }
        Ok(copier)
    }
}

impl Drop for CopyInFlight {
    fn drop(&mut self) {
        if let Some(copier) = &self.copier {
            // An error is reported by the next call that uses the GPU.
            drop(copier.stream.synchronise());
        }
    }
}
