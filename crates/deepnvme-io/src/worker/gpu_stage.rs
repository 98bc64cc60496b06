//! The copies between bounce buffers and GPUs: before the op of a write, and after the op of a read.

use std::collections::HashMap;
use std::sync::Arc;

use deepnvme_mem::Device;

use super::accounts::Accounts;
use super::bounce::BouncePool;
use super::in_flight::{CompletedBlock, InFlightOp};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::{AsyncCopier, CompletedCopy, EngineGpus, GpuSlice};
use crate::sync::lock;
use crate::trace::Tracer;

/// A block whose bytes are being copied from or to a GPU.
pub(super) enum CopyingBlock {
    /// A write. Its op is submitted once its bounce buffer is full.
    Write(InFlightOp),
    /// A read. It is done once its bounce buffer is copied.
    Read(CompletedBlock),
}

/// The blocks of a worker that are being copied from or to GPUs.
pub(super) struct GpuStage {
    // Dropped before the blocks, even when a panic unwinds: it waits for the copies, so no memory is released while a
    // GPU may access it. Created for the first block that needs it.
    copier: Option<AsyncCopier>,
    /// By the numbers of their copies.
    blocks: HashMap<u64, CopyingBlock>,
    gpus: Arc<EngineGpus>,
    /// Whether the bounce buffers were offered to the GPU driver for registration.
    is_arena_registered: bool,
}

impl CopyingBlock {
    fn block(&self) -> &InFlightOp {
        match self {
            Self::Write(block) => block,
            Self::Read(completed) => &completed.block,
        }
    }

    fn into_block(self) -> InFlightOp {
        match self {
            Self::Write(block) => block,
            Self::Read(completed) => completed.block,
        }
    }

    /// Fails the block.
    pub(super) fn fail(self, error: Error) {
        let block = self.into_block();
        let error = block.with_place(error);
        block.guard.end(Err(error));
    }
}

impl GpuStage {
    pub(super) fn new(gpus: &Arc<EngineGpus>) -> Self {
        Self { copier: None, blocks: HashMap::new(), gpus: Arc::clone(gpus), is_arena_registered: false }
    }

    /// Returns the number of blocks that are being copied.
    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Returns the NUMA node of a GPU.
    pub(super) fn node(&self, gpu: Device) -> Option<u32> {
        self.gpus.node(gpu)
    }

    /// Starts to copy the slices of a block's bounce buffer that belong to GPU memory. Fails the block if the
    /// driver refuses.
    pub(super) fn start(
        &mut self,
        copying: CopyingBlock,
        slices: Vec<GpuSlice>,
        bounce: &BouncePool,
        accounts: &Accounts,
    ) {
        match self.submit(copying.block(), slices, bounce, accounts) {
            Ok(number) => {
                self.blocks.insert(number, copying);
            }
            Err(error) => copying.fail(error),
        }
    }

    fn submit(
        &mut self,
        block: &InFlightOp,
        slices: Vec<GpuSlice>,
        bounce: &BouncePool,
        Accounts { stats, tracer }: &Accounts,
    ) -> Result<u64> {
        let Some(buffer) = &block.buffer else {
            return Err(Error::new(ErrorKind::Io, "copy", "a block without a bounce buffer; report this as a bug"));
        };
        let copier = self.copier.get_or_insert_with(|| {
            let tracer = tracer.clone();
            AsyncCopier::new(self.gpus.registry(), Box::new(move || tracer.now()))
        });
        let bytes = slices.iter().map(|slice| slice.len as u64).sum();
        if !self.is_arena_registered
            && let Some(arena) = bounce.arena()
        {
            self.is_arena_registered = true;
            if let Err(error) = copier.register(slices[0].memory.device(), &arena) {
                lock(&stats.staged_reason).get_or_insert(error.detail().to_owned());
            }
        }
        let direction = block.guard.request().plan.direction();
        copier.start(direction, &buffer.region(), slices).inspect(|_| stats.count_gpu_copy(direction, bytes))
    }

    /// Returns the numbers of the completed copies, each with its result.
    pub(super) fn take_completed(&mut self, tracer: &Tracer) -> Vec<(u64, Result<()>)> {
        let completed = self.copier.as_mut().map(AsyncCopier::take_completed).unwrap_or_default();
        for CompletedCopy { outcome, copy, start_ns, end_ns, .. } in &completed {
            tracer.gpu_copy((*start_ns, *end_ns), *copy, outcome.is_err());
        }
        completed.into_iter().map(|CompletedCopy { number, outcome, .. }| (number, outcome)).collect()
    }

    /// Removes the block of a completed copy.
    pub(super) fn remove(&mut self, number: u64) -> Option<CopyingBlock> {
        self.blocks.remove(&number)
    }

    /// Sleeps until a copy is complete, at most a second.
    pub(super) fn wait_for_one(&self) {
        if let Some(copier) = &self.copier {
            copier.wait_for_one();
        }
    }

    /// Waits for all copies, and returns their blocks.
    pub(super) fn into_blocks(self) -> impl Iterator<Item = InFlightOp> {
        let Self { copier, blocks, .. } = self;
        drop(copier);
        blocks.into_values().map(CopyingBlock::into_block)
    }
}
