//! A request's life. [`Request`] is its state: the unclaimed work, the counters, and the first error.
//!
//! `queue` offers requests to the workers, and `worker_handle` wakes a worker. Each `work_item` comes with a guard that
//! ensures its end. `stream_wait_list` holds back requests whose GPU memory is in use. `sync_targets` lists the
//! descriptors to sync after a write. `transfer` is the caller's handle, and `oneshot` carries the result to it.
//! `options` is how a write treats its file, `memory` is the caller's memory, and `cache_query` tells which blocks of a
//! read come from the page cache.

mod cache_query;
mod memory;
mod oneshot;
mod options;
mod queue;
mod stream_wait_list;
mod sync_targets;
mod transfer;
mod work_item;
mod worker_handle;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use deepnvme_mem::Device;
use deepnvme_mem::sync::ignore_poison;

use self::cache_query::LatestQuery;
pub use self::memory::TransferMemory;
pub use self::oneshot::Oneshot;
pub use self::options::{Durability, WriteMode, WriteOptions};
pub use self::queue::REQUESTS_MAX;
pub use self::transfer::Transfer;

pub(crate) use self::memory::{OpaqueMemory, RequestMemory};
pub(crate) use self::queue::{Priority, RequestQueue, WorkKind};
pub(crate) use self::stream_wait_list::StreamWaitList;
pub(crate) use self::sync_targets::SyncTarget;
pub(crate) use self::transfer::take_memory;
pub(crate) use self::work_item::{WorkGuard, WorkItem};
pub(crate) use self::worker_handle::WorkerHandle;
use crate::error::{Error, ErrorKind, Result};
use crate::file::TensorFile;
use crate::gpu::{GpuEvent, GpuSlice};
use crate::op::{Direction, Iovecs};
use crate::split::{Block, BlockPlan, Segment};
use crate::sync::{AtomicBool, AtomicU64, Instant, Mutex, RwLock, RwLockReadGuard, lock};

/// The result of a finished request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Transferred {
    /// Bytes requested.
    pub bytes: u64,
    /// When the request was done, with its syncs.
    pub finished: Instant,
}

/// The progress of a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Progress {
    /// Bytes moved so far.
    pub bytes_done: u64,
    /// Bytes of the request.
    pub bytes_total: u64,
}

/// How much of a request a cancellation has stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cancelled {
    /// Every work item was claimed already.
    Nothing,
    /// Some claimed work items have not ended. The last one to end completes the request.
    Rest,
    /// No claimed work item is left. The canceller completes the request.
    All,
}

/// One request, shared by its workers and its caller. The last block or sync to end completes it.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) plan: BlockPlan,
    /// The files while the request runs. They are released before its completion, so after a wait the request keeps no
    /// file open.
    files: RwLock<Vec<Arc<TensorFile>>>,
    /// The end of the request in each file, which is the final size with `WholeFile`.
    pub(crate) file_ends: Vec<u64>,
    pub(crate) options: WriteOptions,
    /// Events in GPU streams that must be complete before the first block.
    starts_after: Vec<Box<dyn GpuEvent>>,
    has_gpu_memory: bool,
    pub(crate) span: tracing::Span,
    pub(crate) submitted: Instant,
    /// The memory while the request runs, and until `Transfer` takes it back.
    memory: RwLock<Option<RequestMemory>>,
    /// Whether the files get a size or space before the first block. Decided once, since the files may change.
    needs_preparing: bool,
    /// Whether the preparation is unclaimed.
    is_preparation_unclaimed: AtomicBool,
    next_block: AtomicU64,
    cache_query: LatestQuery,
    /// The preparation and the blocks that have not ended. The last one to end continues the request.
    unfinished_items: AtomicU64,
    unfinished_syncs: AtomicU64,
    bytes_done: AtomicU64,
    error: Mutex<Option<Error>>,
    pub(crate) result: Oneshot<Result<Transferred>>,
}

/// A request that is planned, without its memory.
#[derive(Debug)]
pub(crate) struct PlannedRequest {
    pub(crate) plan: BlockPlan,
    pub(crate) files: Vec<Arc<TensorFile>>,
    /// As [`Request::file_ends`].
    pub(crate) file_ends: Vec<u64>,
    pub(crate) has_gpu_memory: bool,
    /// Events in GPU streams that must be complete before the first block.
    pub(crate) starts_after: Vec<Box<dyn GpuEvent>>,
    pub(crate) span: tracing::Span,
}

#[cfg(test)]
impl PlannedRequest {
    /// Plans a request without files.
    pub(crate) fn without_files(plan: BlockPlan, starts_after: Vec<Box<dyn GpuEvent>>) -> Self {
        let span = tracing::Span::none();
        Self { plan, files: Vec::new(), file_ends: Vec::new(), has_gpu_memory: false, starts_after, span }
    }
}

impl Request {
    pub(crate) fn new(planned: PlannedRequest, memory: RequestMemory, options: WriteOptions) -> Self {
        let PlannedRequest { plan, files, file_ends, has_gpu_memory, starts_after, span } = planned;
        let needs_preparing = needs_preparing(&plan, &files, options.mode);
        Self {
            starts_after,
            has_gpu_memory,
            needs_preparing,
            is_preparation_unclaimed: AtomicBool::new(needs_preparing),
            unfinished_items: AtomicU64::new(plan.block_count() + u64::from(needs_preparing)),
            plan,
            files: RwLock::new(files),
            file_ends,
            options,
            span,
            submitted: Instant::now(),
            memory: RwLock::new(Some(memory)),
            next_block: AtomicU64::new(0),
            cache_query: LatestQuery::unknown(),
            unfinished_syncs: AtomicU64::new(0),
            bytes_done: AtomicU64::new(0),
            error: Mutex::new(None),
            result: Oneshot::new(),
        }
    }

    /// Returns whether the GPU streams have reached the events that the request follows.
    pub(crate) fn is_ready(&self) -> Result<bool> {
        for event in &self.starts_after {
            match event.is_complete() {
                Ok(true) => {}
                Ok(false) => return Ok(false),
                Err(error) => {
                    return Err(match self.files().first() {
                        Some(file) => error.at_path(file.path()),
                        None => error,
                    });
                }
            }
        }
        Ok(true)
    }

    /// Returns whether some of its memory is on a GPU.
    pub(crate) fn has_gpu_memory(&self) -> bool {
        self.has_gpu_memory
    }

    /// Returns the first GPU that contains some of its memory.
    pub(crate) fn gpu(&self) -> Option<Device> {
        let on_gpu = |device: Device| (device != Device::Host).then_some(device);
        if !self.has_gpu_memory {
            return None;
        }
        let first = |memory: &RequestMemory| match memory {
            RequestMemory::Targets(targets) => targets.iter().find_map(|target| on_gpu(target.device())),
            RequestMemory::Sources(sources) => sources.iter().find_map(|source| on_gpu(source.device())),
        };
        self.with_memory(first).ok().flatten()
    }

    /// Returns whether some blocks are unclaimed.
    pub(crate) fn has_unclaimed(&self) -> bool {
        self.next_block.load(Ordering::Relaxed) < self.plan.block_count()
    }

    /// Claims the preparation of the files. Returns whether the caller got it.
    pub(crate) fn claim_preparation(&self) -> bool {
        self.is_preparation_unclaimed.swap(false, Ordering::AcqRel)
    }

    /// Claims the next block and returns its index.
    pub(crate) fn claim_block(&self) -> Option<u64> {
        if !self.has_unclaimed() {
            return None;
        }
        let count = self.plan.block_count();
        let index = self.next_block.fetch_add(1, Ordering::Relaxed);
        (index < count).then_some(index)
    }

    /// Records a failure of a claimed work item, if it is the first, and cancels the unclaimed ones.
    pub(crate) fn fail(&self, error: Error) {
        let mut first = lock(&self.error);
        first.get_or_insert(error);
        self.claim_all();
    }

    /// Cancels the unclaimed work items, and records the reason if there were any.
    pub(crate) fn cancel(&self, error: Error) -> Cancelled {
        // The lock keeps `complete` from reading the error between the two steps.
        let mut first = lock(&self.error);
        let (unclaimed, is_last) = self.claim_all();
        if unclaimed == 0 {
            return Cancelled::Nothing;
        }
        first.get_or_insert(error);
        if is_last { Cancelled::All } else { Cancelled::Rest }
    }

    /// Claims all unclaimed blocks and the preparation, and counts them as ended. Returns their number, and whether no
    /// others were left.
    fn claim_all(&self) -> (u64, bool) {
        let count = self.plan.block_count();
        let claimed = self.next_block.swap(count, Ordering::Relaxed).min(count);
        let unclaimed = count - claimed + u64::from(self.claim_preparation());
        (unclaimed, unclaimed > 0 && self.finish(unclaimed))
    }

    /// Counts work items as ended. Returns true with the last one.
    fn finish(&self, items: u64) -> bool {
        let before = self.unfinished_items.fetch_sub(items, Ordering::AcqRel);
        debug_assert!(before >= items, "a work item of a request was ended twice");
        before == items
    }

    pub(crate) fn has_failed(&self) -> bool {
        lock(&self.error).is_some()
    }

    /// Adds work items because a claimed block was split. Its holder ends each of them.
    pub(crate) fn add_items(&self, count: u64) {
        self.unfinished_items.fetch_add(count, Ordering::AcqRel);
    }

    /// Records the end of the preparation or of one block. Returns true for the last of these.
    pub(crate) fn finish_item(&self, bytes: u64) -> bool {
        self.bytes_done.fetch_add(bytes, Ordering::Relaxed);
        self.finish(1)
    }

    pub(crate) fn expect_syncs(&self, count: u64) {
        self.unfinished_syncs.store(count, Ordering::Release);
    }

    /// Records the end of one sync. Returns true for the last one.
    pub(crate) fn finish_sync(&self) -> bool {
        self.unfinished_syncs.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Reports the result to the waiters. The caller must hold no op of this request.
    pub(crate) fn complete(&self) {
        let error = lock(&self.error).clone();
        let bytes_done = self.bytes_done.load(Ordering::Relaxed);
        let result = match error {
            // The end-of-file error already states the bytes read.
            Some(error) if error.kind() == ErrorKind::UnexpectedEof => Err(error),
            Some(error) => Err(error.after_bytes(bytes_done)),
            None => Ok(Transferred { bytes: self.plan.bytes_total(), finished: Instant::now() }),
        };
        let elapsed_us = self.submitted.elapsed().as_micros() as u64;
        let ok = result.is_ok();
        self.span.in_scope(|| tracing::debug!(elapsed_us, bytes_done, ok, "done"));
        drop(std::mem::take(&mut *ignore_poison(self.files.write())));
        self.result.set(result);
    }

    pub(crate) fn progress(&self) -> Progress {
        Progress { bytes_done: self.bytes_done.load(Ordering::Relaxed), bytes_total: self.plan.bytes_total() }
    }

    /// Takes the memory of a finished or refused request. `None` if it was taken already.
    pub(crate) fn take_memory(&self) -> Option<RequestMemory> {
        ignore_poison(self.memory.write()).take()
    }

    fn with_memory<T>(&self, use_it: impl FnOnce(&RequestMemory) -> T) -> Result<T> {
        let memory = ignore_poison(self.memory.read());
        let gone = || Error::new(ErrorKind::Io, self.plan.direction().name(), "the request's memory is gone");
        memory.as_ref().map(use_it).ok_or_else(gone)
    }

    /// Returns the caller's memory of a block, as the iovecs of an op.
    pub(crate) fn iovecs(&self, block: &Block) -> Result<Iovecs> {
        let segments = &self.plan.segments()[block.segments.clone()];
        self.with_memory(|memory| {
            let iovec = |segment: &Segment| {
                let start = segment.offset.max(block.range.start);
                let end = (segment.offset + segment.len).min(block.range.end);
                let range = (start - segment.offset) as usize..(end - segment.offset) as usize;
                memory.item(segment.item).slice(range)
            };
            segments.iter().map(iovec).collect()
        })
    }

    /// Copies between a bounce buffer with the block's `io` range and the caller's host memory. Returns the slices on
    /// GPUs, which are left to be copied.
    pub(crate) fn copy(&self, block: &Block, buffer: &mut deepnvme_mem::Slot) -> Result<Vec<GpuSlice>> {
        let segments = &self.plan.segments()[block.segments.clone()];
        self.with_memory(|memory| {
            let mut left = Vec::new();
            for segment in segments {
                let start = segment.offset.max(block.range.start);
                let end = (segment.offset + segment.len).min(block.range.end);
                let (at, from) = ((start - block.io.start) as usize, (start - segment.offset) as usize);
                let len = (end - start) as usize;
                if self.has_gpu_memory && memory.item_device(segment.item) != Device::Host {
                    left.push(GpuSlice { at, memory: memory.item(segment.item), from, len });
                    continue;
                }
                match memory {
                    RequestMemory::Targets(targets) => buffer.scatter(at, &targets[segment.item as usize], from, len),
                    RequestMemory::Sources(sources) => buffer.gather(at, &sources[segment.item as usize], from, len),
                }
            }
            left
        })
    }

    /// Returns whether a read of this block is faster through the page cache.
    pub(crate) fn is_cached(&self, block: &Block) -> bool {
        self.cache_query.is_cached(&self.plan, &self.file(block), block)
    }

    /// Returns the file of a block.
    pub(crate) fn file(&self, block: &Block) -> Arc<TensorFile> {
        Arc::clone(&self.files()[block.file])
    }

    /// Returns all files of the request. Empty once it is done.
    pub(crate) fn files(&self) -> RwLockReadGuard<'_, Vec<Arc<TensorFile>>> {
        ignore_poison(self.files.read())
    }

    /// Gives each file its final size (`WholeFile`), or the space that a write in place needs.
    pub(crate) fn set_file_sizes(&self) -> Result<()> {
        if self.options.mode == WriteMode::WholeFile {
            return self.files().iter().zip(&self.file_ends).try_for_each(|(file, bytes)| file.allocate_len(*bytes));
        }
        // `file_ends` also counts empty items, which do not extend a file. The segments exclude them.
        for segments in self.plan.segments().chunk_by(|a, b| a.file == b.file) {
            let last = segments[segments.len() - 1];
            let written_bytes = segments.iter().map(|segment| segment.len).sum();
            self.files()[last.file as usize].preallocate(last.offset + last.len, written_bytes)?;
        }
        Ok(())
    }

    /// Returns whether the files must get a size or space before the first block.
    pub(crate) fn needs_preparing(&self) -> bool {
        self.needs_preparing
    }
}

fn needs_preparing(plan: &BlockPlan, files: &[Arc<TensorFile>], mode: WriteMode) -> bool {
    let needs_preallocation = |file: &Arc<TensorFile>| file.needs_preallocation(plan.bytes_total());
    let is_whole = mode == WriteMode::WholeFile;
    let grows = || plan.block_count() > 0 && files.iter().any(needs_preallocation);
    plan.direction() == Direction::Write && (is_whole || grows())
}
