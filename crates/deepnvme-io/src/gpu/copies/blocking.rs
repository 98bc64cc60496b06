//! Blocking copies from and to one GPU.
#![allow(unsafe_code)]

use std::sync::Arc;

use deepnvme_mem::Region;

use super::slice::{GpuSlice, launch};
use crate::error::Result;
use crate::gpu::device::{Gpu, GpuEvent, GpuStream};
use crate::op::Direction;

/// Copies from and to one GPU, and waits until the copies are done.
#[derive(Debug)]
pub(crate) struct BlockingCopier {
    gpu: Arc<dyn Gpu>,
    stream: Box<dyn GpuStream>,
    event: Box<dyn GpuEvent>,
}

impl BlockingCopier {
    pub(crate) fn new(gpu: Arc<dyn Gpu>) -> Result<Self> {
        let (stream, event) = (gpu.new_stream()?, gpu.new_event()?);
        Ok(Self { gpu, stream, event })
    }

    /// Returns the index of its GPU.
    pub(crate) fn index(&self) -> u32 {
        self.gpu.index()
    }

    /// Copies slices to host memory for a write, or from it for a read, and waits until all are done. Nothing else uses
    /// the host memory meanwhile.
    pub(crate) fn copy(&self, direction: Direction, host: &Region, slices: &[GpuSlice]) -> Result<()> {
        let mut outcome = Ok(());
        for slice in slices {
            if outcome.is_ok() {
                // SAFETY: both ends are borrowed for this call, which waits for the event or for the whole stream.
                outcome = unsafe { launch(&*self.stream, direction, host, slice) };
            }
        }
        let waited = self.event.record(self.stream.raw()).and_then(|()| self.event.wait());
        if waited.is_err() {
            let _ = self.stream.synchronise();
        }
        outcome.and(waited)
    }
}
