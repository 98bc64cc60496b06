//! Streams of copies, and handles of other streams.

use std::ptr;
use std::sync::Arc;

use crate::abi::Copy2d;
use crate::abi::{DevicePointer, Handle};
use crate::device::Device;
use crate::error::{NOT_READY, Result};
use crate::rows::Rows;

/// Not synchronised with the default stream.
const NON_BLOCKING: u32 = 1;

/// A stream of another library, by its handle: torch's `stream.cuda_stream`; 0 or 1 the default stream, 2 the
/// per-thread one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RawStream(usize);

impl RawStream {
    /// Creates a value from a handle.
    ///
    /// # Safety
    /// The handle is 0, 1 or 2, or a stream of this process that outlives the last use of this value. The driver
    /// dereferences every other value.
    #[must_use]
    pub const unsafe fn from_handle(handle: usize) -> Self {
        Self(handle)
    }

    /// Returns the handle.
    #[must_use]
    pub const fn as_handle(self) -> usize {
        self.0
    }

    /// Whether all work of the stream is complete.
    ///
    /// # Errors
    /// The driver's error: the device has no such stream, or its work failed.
    pub fn is_idle(self, device: &Device) -> Result<bool> {
        let driver = device.driver();
        let _current = device.enter()?;
        // SAFETY: the creator of the handle guaranteed the stream.
        match unsafe { (driver.functions.stream_query)(self.handle()) } {
            NOT_READY => Ok(false),
            code => driver.check("cuStreamQuery", code).map(|()| true),
        }
    }

    pub(crate) fn handle(self) -> Handle {
        ptr::without_provenance_mut(self.0)
    }
}

/// A stream. Its copies run in order, concurrently with other streams.
#[derive(Debug)]
pub struct Stream {
    device: Arc<Device>,
    stream: Handle,
}

// SAFETY: streams are thread-safe in the driver.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Creates a stream.
    ///
    /// # Errors
    /// The driver's error.
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        let driver = device.driver();
        let _current = device.enter()?;
        let mut stream = ptr::null_mut();
        // SAFETY: the pointer is to a local value, and the device is current.
        let code = unsafe { (driver.functions.stream_create)(&raw mut stream, NON_BLOCKING) };
        driver.check("cuStreamCreate", code)?;
        Ok(Self { device: Arc::clone(device), stream })
    }

    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Returns the handle, valid until the stream is dropped.
    #[must_use]
    pub fn raw(&self) -> RawStream {
        RawStream(self.stream.addr())
    }

    /// Queues a copy of contiguous host memory to rows on the device.
    ///
    /// # Errors
    /// The driver's error, including errors of earlier copies.
    ///
    /// # Safety
    /// Until an event recorded afterwards is complete, `source` is valid for reads of the rows' bytes, and the rows
    /// are memory of this device with no other access.
    pub unsafe fn copy_to_device(&self, target: &Rows, source: *const u8) -> Result<()> {
        let driver = self.device.driver();
        let _current = self.device.enter()?;
        if target.is_2d() && target.count > 1 {
            let copy = Copy2d::to_device(target, source);
            // SAFETY: guaranteed by the caller. The driver reads the description before it returns.
            let code = unsafe { (driver.functions.copy_2d)(&raw const copy, self.stream) };
            return driver.check("cuMemcpy2DAsync", code);
        }
        for (number, row) in target.each_row().enumerate() {
            let source = source.wrapping_add(number * row.bytes).cast();
            let address = row.address as DevicePointer;
            // SAFETY: guaranteed by the caller: these are the bytes of one row.
            let code = unsafe { (driver.functions.copy_to_device)(address, source, row.bytes, self.stream) };
            driver.check("cuMemcpyHtoDAsync", code)?;
        }
        Ok(())
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
        let driver = self.device.driver();
        let _current = self.device.enter()?;
        if source.is_2d() && source.count > 1 {
            let copy = Copy2d::to_host(target, source);
            // SAFETY: guaranteed by the caller. The driver reads the description before it returns.
            let code = unsafe { (driver.functions.copy_2d)(&raw const copy, self.stream) };
            return driver.check("cuMemcpy2DAsync", code);
        }
        for (number, row) in source.each_row().enumerate() {
            let target = target.wrapping_add(number * row.bytes).cast();
            let address = row.address as DevicePointer;
            // SAFETY: guaranteed by the caller: these are the bytes of one row.
            let code = unsafe { (driver.functions.copy_to_host)(target, address, row.bytes, self.stream) };
            driver.check("cuMemcpyDtoHAsync", code)?;
        }
        Ok(())
    }

    /// Waits until all queued work is complete.
    ///
    /// # Errors
    /// The driver's error, including errors of the copies.
    pub fn synchronize(&self) -> Result<()> {
        let driver = self.device.driver();
        let _current = self.device.enter()?;
        // SAFETY: the stream is valid.
        driver.check("cuStreamSynchronize", unsafe { (driver.functions.stream_synchronize)(self.stream) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let current = self.device.enter();
        if current.is_ok() {
            // SAFETY: destroyed once. Queued work still completes.
            let _ = unsafe { (self.device.driver().functions.stream_destroy)(self.stream) };
        }
    }
}
