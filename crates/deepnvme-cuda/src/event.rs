//! Events: points in a stream.

use std::ptr;
use std::sync::Arc;

use crate::abi::Handle;
use crate::device::Device;
use crate::error::{NOT_READY, Result, SUCCESS};
use crate::stream::RawStream;

/// No timestamps, which would cost a memory write.
const DISABLE_TIMING: u32 = 2;
/// Waiting threads sleep.
const BLOCKING_SYNC: u32 = 1;

/// A point in a stream that can be queried and waited for.
#[derive(Debug)]
pub struct Event {
    device: Arc<Device>,
    event: Handle,
}

// SAFETY: events are thread-safe in the driver.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event. It counts as complete until it is recorded.
    ///
    /// # Errors
    /// The driver's error.
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        let driver = device.driver();
        let _current = device.enter()?;
        let mut event = ptr::null_mut();
        // SAFETY: the pointer is to a local value, and the device is current.
        let code = unsafe { (driver.functions.event_create)(&raw mut event, DISABLE_TIMING | BLOCKING_SYNC) };
        driver.check("cuEventCreate", code)?;
        Ok(Self { device: Arc::clone(device), event })
    }

    /// Records this event on the stream.
    ///
    /// # Errors
    /// The driver's error, for example that the device has no such stream.
    pub fn record(&self, stream: RawStream) -> Result<()> {
        let driver = self.device.driver();
        let _current = self.device.enter()?;
        // SAFETY: the event is valid, and the creator of the handle guaranteed the stream.
        let code = unsafe { (driver.functions.event_record)(self.event, stream.handle()) };
        driver.check("cuEventRecord", code)
    }

    /// Whether all work before it is complete.
    ///
    /// # Errors
    /// The driver's error, including errors of earlier work.
    pub fn is_complete(&self) -> Result<bool> {
        let driver = self.device.driver();
        let _current = self.device.enter()?;
        // SAFETY: the event is valid.
        match unsafe { (driver.functions.event_query)(self.event) } {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            code => driver.check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Sleeps until all work before it is complete.
    ///
    /// # Errors
    /// As [`is_complete`](Self::is_complete).
    pub fn wait(&self) -> Result<()> {
        let driver = self.device.driver();
        let _current = self.device.enter()?;
        // SAFETY: the event is valid.
        driver.check("cuEventSynchronize", unsafe { (driver.functions.event_synchronize)(self.event) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let current = self.device.enter();
        if current.is_ok() {
            // SAFETY: destroyed once. The driver keeps what a stream still needs.
            let _ = unsafe { (self.device.driver().functions.event_destroy)(self.event) };
        }
    }
}
