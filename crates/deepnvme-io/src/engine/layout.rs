//! Turns the tensors of a call into a request: its files, the segments of each, and the plan of their blocks.

use std::collections::HashMap;
use std::sync::Arc;

use deepnvme_mem::{Device, Region, RegionMut, StreamHandle};

use crate::backend::gds::Gds;
use crate::config::{Config, DirectMode};
use crate::error::{Error, Result};
use crate::file::{DirectState, TensorFile};
use crate::gpu::EngineGpus;
use crate::op::Direction;
use crate::request::{PlannedRequest, Request, RequestMemory, RequestQueue, WriteOptions};
use crate::split::{BlockPlan, BlockSizes, Segment};
use crate::stats::WorkerStats;
use crate::sync::lock;
use crate::worker::gds_required;

/// Minimum bytes of a target to request huge pages for. For smaller tensors, the advice would only split the process's
/// memory map into more pieces.
const HUGE_ADVICE_BYTES_MIN: usize = 8 << 20;

/// One tensor to read.
#[derive(Debug)]
pub struct ReadItem {
    /// The file to read.
    pub file: Arc<TensorFile>,
    /// The file offset, in bytes.
    pub offset: u64,
    /// The memory to fill. Its length is the number of bytes to read.
    pub target: RegionMut,
}

/// One tensor to write.
#[derive(Debug)]
pub struct WriteItem {
    /// The file to write.
    pub file: Arc<TensorFile>,
    /// The file offset, in bytes.
    pub offset: u64,
    /// The memory to write. Its length is the number of bytes to write.
    pub source: Region,
}

/// Makes the requests of an engine.
#[derive(Debug)]
pub(super) struct RequestPlanner {
    pub(super) config: Config,
    pub(super) queue: Arc<RequestQueue>,
    pub(super) gpus: Arc<EngineGpus>,
    pub(super) gds: Arc<Gds>,
    /// For the reasons of fallbacks.
    pub(super) stats: Arc<WorkerStats>,
}

impl RequestPlanner {
    /// Makes a read request. Returns the memory with an error.
    pub(super) fn read(&self, items: Vec<ReadItem>) -> Result<Arc<Request>, (Error, RequestMemory)> {
        let mut builder = RequestBuilder::default();
        let mut targets = Vec::with_capacity(items.len());
        for ReadItem { file, offset, target } in items {
            let address =
                builder.add_memory(target.device(), target.stream(), target.is_contiguous().then(|| target.addr()));
            if target.len() >= HUGE_ADVICE_BYTES_MIN {
                target.advise_huge();
            }
            builder.add_segment(file, offset, target.len(), address);
            targets.push(target);
        }
        let memory = RequestMemory::Targets(targets);
        match self.plan(Direction::Read, builder) {
            Ok(planned) => Ok(Arc::new(Request::new(planned, memory, WriteOptions::default()))),
            Err(error) => Err((error, memory)),
        }
    }

    /// Makes a write request.
    pub(super) fn write(&self, items: Vec<WriteItem>, options: WriteOptions) -> Result<Arc<Request>> {
        let mut builder = RequestBuilder::default();
        let mut sources = Vec::with_capacity(items.len());
        for WriteItem { file, offset, source } in items {
            let address =
                builder.add_memory(source.device(), source.stream(), source.is_contiguous().then(|| source.addr()));
            builder.add_segment(file, offset, source.len(), address);
            sources.push(source);
        }
        let planned = self.plan(Direction::Write, builder)?;
        Ok(Arc::new(Request::new(planned, RequestMemory::Sources(sources), options)))
    }

    fn plan(&self, direction: Direction, builder: RequestBuilder) -> Result<PlannedRequest> {
        self.queue.check_process()?;
        let RequestBuilder { files, file_ends, segments, streams, .. } = builder;
        self.record_buffered(&files);
        let mut geometries: Vec<_> = files.iter().map(|file| file.geometry()).collect();
        let with_path = |error: Error| match files.first() {
            Some(file) => error.at_path(file.path()),
            None => error,
        };
        let (block_bytes, bounce_bytes) = (self.config.block_bytes, self.config.bounce_buffer_bytes());
        let mut sizes = BlockSizes { block_bytes, bounce_bytes, gds_bytes: block_bytes };
        if !streams.is_empty() && self.has_gds(&files).map_err(with_path)? {
            sizes.gds_bytes = self.gds.block_bytes(block_bytes);
            geometries.iter_mut().for_each(|geometry| geometry.has_gds = true);
        }
        let plan = BlockPlan::new(direction, &geometries, segments, sizes).map_err(with_path)?;
        let starts_after = self.gpus.record_events(&streams).map_err(with_path)?;
        let span = tracing::debug_span!(
            "request",
            verb = direction.name(),
            path = files.first().map(|file| tracing::field::display(file.path().display())),
            files = files.len(),
            bytes = plan.bytes_total(),
            blocks = plan.block_count(),
        );
        let has_gpu_memory = !streams.is_empty();
        Ok(PlannedRequest { plan, files, file_ends, has_gpu_memory, starts_after, span })
    }

    /// Returns whether cuFile may serve some of these files. Fails if cuFile is required and is known not to serve all
    /// of them.
    fn has_gds(&self, files: &[Arc<TensorFile>]) -> Result<bool> {
        if self.config.gds == DirectMode::Disabled {
            return Ok(false);
        }
        let cufile = self.gds.cufile();
        let buffered = || {
            files.iter().find_map(|file| match file.direct() {
                DirectState::Direct { .. } => None,
                DirectState::Buffered { reason } => Some(format!("the file has no direct I/O ({reason})")),
            })
        };
        match cufile.as_ref().err().cloned().or_else(buffered) {
            None => {}
            Some(reason) if self.config.gds == DirectMode::Required => return Err(gds_required(&reason)),
            Some(reason) => {
                lock(&self.stats.gds_reason).get_or_insert(reason);
            }
        }
        Ok(cufile.is_ok())
    }

    /// Keeps the first reason why a file has no direct I/O, for `stats`: no fallback is silent.
    fn record_buffered(&self, files: &[Arc<TensorFile>]) {
        if self.config.direct == DirectMode::Disabled {
            return;
        }
        let mut noted = lock(&self.stats.buffered_reason);
        if noted.is_none() {
            *noted = files.iter().find_map(|file| match file.direct() {
                DirectState::Direct { .. } => None,
                DirectState::Buffered { reason } => Some(reason),
            });
        }
    }
}

/// The files and segments of a request, while they are collected.
#[derive(Default)]
struct RequestBuilder {
    files: Vec<Arc<TensorFile>>,
    file_ends: Vec<u64>,
    /// Indices into `files`, by the address of a file.
    index_of: HashMap<usize, u32>,
    segments: Vec<Segment>,
    /// The GPU streams that the memory belongs to.
    streams: Vec<(Device, StreamHandle)>,
}

impl RequestBuilder {
    /// Returns the address for the kernel if the memory is on the host, and whether it is contiguous on a GPU.
    fn add_memory(&mut self, device: Device, stream: StreamHandle, address: Option<usize>) -> (Option<usize>, bool) {
        if device == Device::Host {
            return (address, false);
        }
        if !self.streams.contains(&(device, stream)) {
            self.streams.push((device, stream));
        }
        (None, address.is_some())
    }

    fn add_segment(
        &mut self,
        file: Arc<TensorFile>,
        offset: u64,
        len: usize,
        (address, is_contiguous_gpu): (Option<usize>, bool),
    ) {
        let identity = Arc::as_ptr(&file) as usize;
        let file = *self.index_of.entry(identity).or_insert_with(|| {
            self.files.push(file);
            self.file_ends.push(0);
            self.files.len() as u32 - 1
        });
        let end = &mut self.file_ends[file as usize];
        *end = (*end).max(offset.saturating_add(len as u64));
        let item = self.segments.len() as u32;
        self.segments.push(Segment { file, item, offset, len: len as u64, address, is_contiguous_gpu });
    }
}
