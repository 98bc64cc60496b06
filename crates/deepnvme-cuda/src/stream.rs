//! A queue of copies of our own, and the names of other streams.

use std::ptr;
use std::sync::Arc;

use crate::abi::Copy2d;
use crate::abi::{DevicePointer, Handle};
use crate::device::Device;
use crate::error::{NOT_READY, Result};
use crate::rows::Rows;

/// It does not wait for the default stream, nor that for it.
const NON_BLOCKING: u32 = 1;

/// Somebody's stream, by its handle: torch's `stream.cuda_stream`, 0 or 1 the default stream, 2 the thread's own.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RawStream(usize);

impl RawStream {
    /// Names a stream.
    ///
    /// # Safety
    /// The handle is 0, 1, 2, or that of a stream of this process, which is not destroyed before the last use of this name:
    /// the driver looks behind any other number as if a stream were there.
    #[must_use]
    pub const unsafe fn from_handle(handle: usize) -> Self {
        Self(handle)
    }

    /// The handle.
    #[must_use]
    pub const fn as_handle(self) -> usize {
        self.0
    }

    /// Whether the stream has done all that it was given.
    ///
    /// # Errors
    /// What the driver says: that there is no such stream on the device, or that something there has failed.
    pub fn is_idle(self, device: &Device) -> Result<bool> {
        let driver = device.driver();
        let _current = device.enter()?;
        // SAFETY: whoever made the name has promised that there is such a stream.
        match unsafe { (driver.functions.stream_query)(self.handle()) } {
            NOT_READY => Ok(false),
            code => driver.check("cuStreamQuery", code).map(|()| true),
        }
    }

    pub(crate) fn handle(self) -> Handle {
        ptr::without_provenance_mut(self.0)
    }
}

/// A stream of our own. Its copies run in the order in which they were given, beside those of all other streams.
#[derive(Debug)]
pub struct Stream {
    device: Arc<Device>,
    stream: Handle,
}

// SAFETY: the driver lets any thread use a stream, and locks by itself.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new one.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        let driver = device.driver();
        let _current = device.enter()?;
        let mut stream = ptr::null_mut();
        // SAFETY: the pointer is to a value of ours, and the device is current.
        let code = unsafe { (driver.functions.stream_create)(&raw mut stream, NON_BLOCKING) };
        driver.check("cuStreamCreate", code)?;
        Ok(Self { device: Arc::clone(device), stream })
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Its name, for events, until it is dropped.
    #[must_use]
    pub fn raw(&self) -> RawStream {
        RawStream(self.stream.addr())
    }

    /// Copies bytes that lie side by side on the host to rows on the device, some time after this returns.
    ///
    /// # Errors
    /// What the driver says; also of copies that were given before.
    ///
    /// # Safety
    /// Until an event recorded after this is over, `source` is valid for reads of the rows' bytes, and the rows are memory
    /// of this device that nothing else reads or writes.
    pub unsafe fn copy_to_device(&self, target: &Rows, source: *const u8) -> Result<()> {
        let driver = self.device.driver();
        let _current = self.device.enter()?;
        if target.is_plane() && target.count > 1 {
            let copy = Copy2d::to_device(target, source);
            // SAFETY: passed on to the caller; the driver has read the description when it returns.
            let code = unsafe { (driver.functions.copy_2d)(&raw const copy, self.stream) };
            return driver.check("cuMemcpy2DAsync", code);
        }
        for (number, row) in target.singly().enumerate() {
            let source = source.wrapping_add(number * row.bytes).cast();
            let address = row.address as DevicePointer;
            // SAFETY: passed on to the caller: these are the bytes of one row.
            let code = unsafe { (driver.functions.copy_to_device)(address, source, row.bytes, self.stream) };
            driver.check("cuMemcpyHtoDAsync", code)?;
        }
        Ok(())
    }

    /// Copies rows on the device to the host, side by side, some time after this returns.
    ///
    /// # Errors
    /// As [`copy_to_device`](Self::copy_to_device).
    ///
    /// # Safety
    /// Until an event recorded after this is over, `target` is valid for writes of the rows' bytes and nothing else uses
    /// them, and the rows are memory of this device that nothing writes.
    pub unsafe fn copy_to_host(&self, target: *mut u8, source: &Rows) -> Result<()> {
        let driver = self.device.driver();
        let _current = self.device.enter()?;
        if source.is_plane() && source.count > 1 {
            let copy = Copy2d::to_host(target, source);
            // SAFETY: passed on to the caller; the driver has read the description when it returns.
            let code = unsafe { (driver.functions.copy_2d)(&raw const copy, self.stream) };
            return driver.check("cuMemcpy2DAsync", code);
        }
        for (number, row) in source.singly().enumerate() {
            let target = target.wrapping_add(number * row.bytes).cast();
            let address = row.address as DevicePointer;
            // SAFETY: passed on to the caller: these are the bytes of one row.
            let code = unsafe { (driver.functions.copy_to_host)(target, address, row.bytes, self.stream) };
            driver.check("cuMemcpyDtoHAsync", code)?;
        }
        Ok(())
    }

    /// Waits until all that was given to it is over.
    ///
    /// # Errors
    /// What the driver says, also of the copies.
    pub fn synchronize(&self) -> Result<()> {
        let driver = self.device.driver();
        let _current = self.device.enter()?;
        // SAFETY: the stream is one of ours.
        driver.check("cuStreamSynchronize", unsafe { (driver.functions.stream_synchronize)(self.stream) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let current = self.device.enter();
        if current.is_ok() {
            // SAFETY: this is the only end of it; what it was given still runs to its end.
            let _ = unsafe { (self.device.driver().functions.stream_destroy)(self.stream) };
        }
    }
}
