//! CUDA streams: owned ones for copies, and borrowed handles.

use std::ffi::c_int;
use std::marker::PhantomData;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use crate::abi::{Copy2d, DevicePointer, Handle};
use crate::backoff::poll;
use crate::capture::NOT_CAPTURING;
use crate::context_object::ContextObject;
use crate::device::Device;
use crate::driver::{Driver, Functions};
use crate::error::{CAPTURE_UNSUPPORTED, NOT_READY, Result};
use crate::rows::Rows;

/// Not synchronised with the default stream.
const NON_BLOCKING: u32 = 1;

/// A stream by its handle, such as torch's `stream.cuda_stream`. 0 and 1 are the default stream, 2 is the per-thread
/// one. The stream exists for the lifetime.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RawStream<'a>(usize, PhantomData<&'a Stream>);

impl RawStream<'_> {
    /// Creates a value from a handle.
    ///
    /// # Safety
    /// The handle is 0, 1 or 2, or a stream of this process that exists for the lifetime of the result. The driver
    /// dereferences every other value.
    #[must_use]
    pub const unsafe fn from_handle(handle: usize) -> Self {
        Self(handle, PhantomData)
    }

    /// Returns the handle.
    #[must_use]
    pub const fn as_handle(self) -> usize {
        self.0
    }

    /// Returns whether all work of the stream is complete.
    ///
    /// # Errors
    /// The driver's error: the device has no such stream, or its work failed. An error whose `is_capturing` is true, if
    /// the stream is being captured into a CUDA graph; the capture goes on.
    pub fn is_idle(self, device: &Device) -> Result<bool> {
        let _current = device.enter()?;
        self.query_unless_capturing(device.driver())
    }

    /// Waits for all work of a stream of the current device.
    pub(crate) fn wait(self, driver: &Driver) -> Result<()> {
        poll(Duration::MAX, || self.query_unless_capturing(driver)).map(drop)
    }

    /// Returns whether all work of the stream is complete. Refuses a stream that is being captured, because a query
    /// would invalidate the capture. The stream belongs to the current device.
    fn query_unless_capturing(self, driver: &Driver) -> Result<bool> {
        let mut capture = NOT_CAPTURING;
        // SAFETY: the stream exists for the lifetime of `self`, as `Stream::raw` and the callers of `from_handle`
        // ensure. The pointer is to a local value.
        let code = unsafe { (driver.functions.stream_is_capturing)(self.handle(), &raw mut capture) };
        driver.check("cuStreamIsCapturing", code)?;
        if capture != NOT_CAPTURING {
            // A capture that another thread begins after this check is still invalidated by the query.
            return driver.check("cuStreamIsCapturing", CAPTURE_UNSUPPORTED).map(|()| false);
        }
        // SAFETY: the stream exists for the lifetime of `self`, as `Stream::raw` and the callers of `from_handle` ensure.
        unsafe { query(driver, self.handle()) }
    }

    pub(crate) fn handle(self) -> Handle {
        ptr::without_provenance_mut(self.0)
    }
}

/// Calls `cuStreamQuery`, and returns whether all work of the stream is complete. The stream belongs to the current
/// device, and is not being captured.
///
/// # Safety
/// The stream exists until this returns.
unsafe fn query(driver: &Driver, stream: Handle) -> Result<bool> {
    // SAFETY: the stream exists until the call returns, as the caller of `query` ensures.
    match unsafe { (driver.functions.stream_query)(stream) } {
        NOT_READY => Ok(false),
        code => driver.check("cuStreamQuery", code).map(|()| true),
    }
}

/// A stream. Its copies run in order, concurrently with other streams.
#[derive(Debug)]
pub struct Stream(ContextObject);

impl Stream {
    /// Creates a stream.
    ///
    /// # Errors
    /// The driver's error.
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        let Functions { stream_create, stream_destroy, .. } = device.driver().functions;
        // SAFETY: the two functions belong together.
        unsafe { ContextObject::new(device, "cuStreamCreate", stream_create, NON_BLOCKING, stream_destroy) }.map(Self)
    }

    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        self.0.device()
    }

    /// Returns the stream by its handle.
    #[must_use]
    pub fn raw(&self) -> RawStream<'_> {
        RawStream(self.0.handle().addr(), PhantomData)
    }

    /// Queues a copy of contiguous host memory to rows on the device.
    ///
    /// # Errors
    /// The driver's error, including errors of earlier copies. Some of the rows may be queued even then.
    ///
    /// # Safety
    /// Until an event recorded afterwards is complete, `source` is valid for reads of the rows' bytes, and the rows
    /// are memory of this device with no other access.
    pub unsafe fn copy_to_device(&self, target: &Rows, source: *const u8) -> Result<()> {
        let copy = self.0.device().driver().functions.copy_to_device;
        let copy_row = |at, address, bytes, stream| {
            // SAFETY: `at` and `address` are one row of `target`. Its bytes, and as many of `source`, stay valid until
            // a later event is complete, as the caller of `copy_to_device` ensures.
            unsafe { copy(address, source.wrapping_add(at).cast(), bytes, stream) }
        };
        // SAFETY: `source` and the rows of `target` stay valid until a later event is complete, as the caller of
        // `copy_to_device` ensures. `Copy2d::to_device` and `copy_row` describe these bytes only.
        unsafe { self.copy(target, || Copy2d::to_device(target, source), "cuMemcpyHtoDAsync", copy_row) }
    }

    /// Queues a copy of rows on the device to contiguous host memory.
    ///
    /// # Errors
    /// As [`copy_to_device`](Self::copy_to_device).
    ///
    /// # Safety
    /// Until an event recorded afterwards is complete, `target` is valid for writes of the rows' bytes with no other
    /// access, and the rows are memory of this device that is not written.
    pub unsafe fn copy_to_host(&self, target: *mut u8, source: &Rows) -> Result<()> {
        let copy = self.0.device().driver().functions.copy_to_host;
        let copy_row = |at, address, bytes, stream| {
            // SAFETY: `at` and `address` are one row of `source`. Its bytes, and as many of `target`, stay valid until
            // a later event is complete, as the caller of `copy_to_host` ensures.
            unsafe { copy(target.wrapping_add(at).cast(), address, bytes, stream) }
        };
        // SAFETY: `target` and the rows of `source` stay valid until a later event is complete, as the caller of
        // `copy_to_host` ensures. `Copy2d::to_host` and `copy_row` describe these bytes only.
        unsafe { self.copy(source, || Copy2d::to_host(target, source), "cuMemcpyDtoHAsync", copy_row) }
    }

    /// Queues a 2-D copy, or else a copy of each row. `copy_row` makes the driver's `call` for a row, by its offset in
    /// host memory.
    ///
    /// # Safety
    /// The memory that `copy_2d` describes and `copy_row` copies stays valid until an event recorded afterwards is
    /// complete.
    unsafe fn copy(
        &self,
        rows: &Rows,
        copy_2d: impl FnOnce() -> Copy2d,
        call: &'static str,
        copy_row: impl Fn(usize, DevicePointer, usize, Handle) -> c_int,
    ) -> Result<()> {
        let (driver, _current) = self.0.enter()?;
        if rows.count > 1 && rows.is_2d(self.0.device().pitch_max()) {
            let copy = copy_2d();
            // SAFETY: the memory that the description names stays valid until a later event is complete, as the caller
            // of `copy` ensures. The driver reads the description itself before it returns.
            let code = unsafe { (driver.functions.copy_2d)(&raw const copy, self.0.handle()) };
            return driver.check("cuMemcpy2DAsync", code);
        }
        for (number, row) in rows.each_row().enumerate() {
            let code = copy_row(number * row.bytes, row.address as DevicePointer, row.bytes, self.0.handle());
            driver.check(call, code)?;
        }
        Ok(())
    }

    /// Waits until all queued work is complete.
    ///
    /// # Errors
    /// The driver's error, including errors of the copies. The context is then destroyed or broken, and the driver has
    /// ended its work: making a live context current cannot fail, nor can a query of a stream that exists.
    pub fn synchronise(&self) -> Result<()> {
        let (driver, _current) = self.0.enter()?;
        // SAFETY: `self` owns the stream, so it exists until the call returns.
        let is_complete = || unsafe { query(driver, self.0.handle()) };
        poll(Duration::MAX, is_complete).map(drop)
    }
}
