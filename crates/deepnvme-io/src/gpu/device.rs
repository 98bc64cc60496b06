//! The engine's interface to one GPU, for any vendor: memory, streams that copy, and events that report progress.
#![allow(unsafe_code)]

use std::any::Any;
use std::fmt::Debug;
use std::time::Duration;

use deepnvme_mem::{RegionMut, RegistrableRange, Rows, StreamHandle};

use crate::error::Result;

/// The longest wait for a copy before it is polled again.
pub(crate) const COPY_WAIT: Duration = Duration::from_secs(1);

/// The longest wait for a caller's stream. A kernel may wait for another process, as those of NCCL do for up to ten
/// minutes by default.
pub(crate) const CALLER_STREAM_TIMEOUT: Duration = Duration::from_secs(1800);

/// One GPU, shared by any number of threads.
///
/// Its errors are the engine's, usually `Device`, with the driver's message and a matching remedy. They may also be
/// about earlier work on the GPU.
pub(crate) trait Gpu: Any + Debug + Send + Sync {
    /// Returns its index in the driver's numbering.
    fn index(&self) -> u32;

    /// Returns its PCI bus address, as in `/sys/bus/pci/devices`, if the driver reports it.
    fn pci_bus_id(&self) -> Option<String>;

    /// Creates a stream that is independent of all others.
    fn new_stream(&self) -> Result<Box<dyn GpuStream>>;

    /// Creates an event without a recorded point, which counts as complete.
    fn new_event(&self) -> Result<Box<dyn GpuEvent>>;

    /// Returns whether a stream, of the engine or of others, has completed all its work. Fails if it does not exist.
    fn is_idle(&self, stream: StreamHandle) -> Result<bool>;

    /// Allocates GPU memory, uninitialised. Dropping the last region of it frees it.
    fn allocate(&self, bytes: usize) -> Result<RegionMut>;

    /// Registers host memory with the driver, so that copies from and to it need no staging, until the result is
    /// dropped.
    fn register(&self, arena: &RegistrableRange) -> Result<Box<dyn Registration>>;
}

/// A stream of the engine. Its copies run in order, concurrently with all other streams.
pub(crate) trait GpuStream: Debug + Send + Sync {
    /// Returns its handle, for events.
    fn raw(&self) -> StreamHandle;

    /// Copies contiguous bytes on the host to rows on the GPU, asynchronously.
    ///
    /// # Safety
    /// Until an event that is recorded after this call is complete, or the stream is synchronised, two conditions hold.
    /// `source` is valid for reads of as many bytes as the rows have. The rows are memory of this GPU that nothing else
    /// reads or writes.
    unsafe fn copy_to_gpu(&self, target: Rows, source: *const u8) -> Result<()>;

    /// Copies rows on the GPU to contiguous bytes on the host, asynchronously.
    ///
    /// # Safety
    /// Until an event that is recorded after this call is complete, or the stream is synchronised, two conditions hold.
    /// `target` is valid for writes of as many bytes as the rows have, and nothing else uses these bytes. The rows are
    /// memory of this GPU that nothing writes.
    unsafe fn copy_to_host(&self, target: *mut u8, source: Rows) -> Result<()>;

    /// Waits until all submitted work is complete. After a failure, nothing runs there any more: the driver reports one
    /// only for a context that is destroyed or broken, whose work it has ended.
    ///
    /// It waits without a limit, since the memory of a copy must not be released earlier. The streams of the engine
    /// wait for no others, and the driver reports a GPU that has failed.
    fn synchronise(&self) -> Result<()>;
}

/// A point in a stream. It can be recorded repeatedly.
pub(crate) trait GpuEvent: Debug + Send + Sync {
    /// Records the current end of a stream, of the engine or of others. Fails if the stream does not exist.
    fn record(&self, stream: StreamHandle) -> Result<()>;

    /// Returns whether all work before the point is complete. Fails if some of that work failed.
    fn is_complete(&self) -> Result<bool>;

    /// Waits until all work before the point is complete. Fails as [`is_complete`](Self::is_complete), and after
    /// `limit`.
    fn wait(&self, limit: Duration) -> Result<()>;
}

/// Host memory registered with a driver until this is dropped. It keeps the memory alive.
pub(crate) trait Registration: Debug + Send + Sync {}
