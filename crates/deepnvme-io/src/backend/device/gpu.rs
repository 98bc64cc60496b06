//! One GPU as the engine sees it, whoever made it: memory to copy from and to, streams that copy, and events that say how far
//! they are.
#![allow(unsafe_code)]

use std::any::Any;
use std::fmt::Debug;

use deepnvme_mem::{Region, RegionMut, StreamHandle};

use crate::error::Result;

/// One GPU, for any number of threads.
///
/// Its errors are the engine's own (`Device`), with what the driver said and a remedy that fits it. They may also be about
/// earlier work on the GPU.
pub(crate) trait Gpu: Any + Debug + Send + Sync {
    /// Its number, as its driver counts.
    fn index(&self) -> u32;

    /// Where it is on the PCI bus, as in `/sys/bus/pci/devices`, where the driver says so.
    fn pci_bus_id(&self) -> Option<String>;

    /// A new stream, which waits for no other, nor any other for it.
    fn new_stream(&self) -> Result<Box<dyn GpuStream>>;

    /// An event that nothing has been recorded in, which counts as over.
    fn new_event(&self) -> Result<Box<dyn GpuEvent>>;

    /// Whether a stream, also somebody else's, has done all that it was given. One that does not exist is an error.
    fn is_idle(&self, stream: StreamHandle) -> Result<bool>;

    /// Allocates that many bytes of its memory, uninitialised. The last region of them frees them.
    fn allocate(&self, bytes: usize) -> Result<RegionMut>;

    /// Has the driver know memory of the host, so that copies from and to it need no staging, until the answer is dropped.
    fn register(&self, arena: &Region) -> Result<Box<dyn Registration>>;
}

/// A stream of the engine's own: its copies run in the order in which they were given, beside those of all other streams.
pub(crate) trait GpuStream: Debug + Send + Sync {
    /// Its name, for events.
    fn raw(&self) -> StreamHandle;

    /// Copies bytes that lie side by side on the host to rows on the GPU, some time after this returns.
    ///
    /// # Safety
    /// Until an event recorded after this is over, or the stream has been waited for, `source` is valid for reads of the rows'
    /// bytes, and the rows are memory of this GPU that nothing else reads or writes.
    unsafe fn copy_to_gpu(&self, target: Rows, source: *const u8) -> Result<()>;

    /// Copies rows on the GPU to the host, side by side, some time after this returns.
    ///
    /// # Safety
    /// Until an event recorded after this is over, or the stream has been waited for, `target` is valid for writes of the rows'
    /// bytes and nothing else uses them, and the rows are memory of this GPU that nothing writes.
    unsafe fn copy_to_host(&self, target: *mut u8, source: Rows) -> Result<()>;

    /// Waits until all that was given to it is over. Where this fails, nothing runs there any more.
    fn synchronize(&self) -> Result<()>;
}

/// A point in a stream. It can be recorded again and again.
pub(crate) trait GpuEvent: Debug + Send + Sync {
    /// Becomes the point behind all that has been given to a stream, also somebody else's. One that does not exist is an error.
    fn record(&self, stream: StreamHandle) -> Result<()>;

    /// Whether all before it is over. That something before it has failed is an error.
    fn is_over(&self) -> Result<bool>;

    /// Waits until all before it is over, asleep. Errors are those of [`is_over`](Self::is_over).
    fn wait(&self) -> Result<()>;
}

/// Memory of the host that a driver knows, until this is dropped. It keeps the memory alive.
pub(crate) trait Registration: Debug + Send + Sync {}

/// Pieces of equal length at equal distances in a GPU's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rows {
    /// Where the first one is.
    pub(crate) address: usize,
    /// Bytes of each.
    pub(crate) bytes: usize,
    /// How many there are.
    pub(crate) count: usize,
    /// From the beginning of one to that of the next; of no meaning where there is one.
    pub(crate) pitch: isize,
}

impl Rows {
    /// Bytes of all rows.
    pub(crate) const fn total_bytes(&self) -> usize {
        self.bytes * self.count
    }
}
