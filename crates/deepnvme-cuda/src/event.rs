//! A point in a stream.

use std::ptr;
use std::sync::Arc;

use crate::abi::Handle;
use crate::device::Device;
use crate::error::{NOT_READY, Result, SUCCESS};
use crate::stream::RawStream;

/// No times are taken: they would cost a write to memory.
const DISABLE_TIMING: u32 = 2;
/// Who waits sleeps.
const BLOCKING_SYNC: u32 = 1;

/// A point in a stream: whether all before it is over can be asked, and waited for.
#[derive(Debug)]
pub struct Event {
    device: Arc<Device>,
    event: Handle,
}

// SAFETY: the driver lets any thread use an event, and locks by itself.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event that nothing has been recorded in, which counts as over.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        let driver = device.driver();
        let _current = device.enter()?;
        let mut event = ptr::null_mut();
        // SAFETY: the pointer is to a value of ours, and the device is current.
        let code = unsafe { (driver.functions.event_create)(&raw mut event, DISABLE_TIMING | BLOCKING_SYNC) };
        driver.check("cuEventCreate", code)?;
        Ok(Self { device: Arc::clone(device), event })
    }

    /// Becomes the point behind all that has been given to the stream.
    ///
    /// # Errors
    /// What the driver says, above all that there is no such stream on the device.
    pub fn record(&self, stream: RawStream) -> Result<()> {
        let driver = self.device.driver();
        let _current = self.device.enter()?;
        // SAFETY: the event is one of ours, and whoever made the name has promised that there is such a stream.
        let code = unsafe { (driver.functions.event_record)(self.event, stream.handle()) };
        driver.check("cuEventRecord", code)
    }

    /// Whether all before it is over.
    ///
    /// # Errors
    /// What the driver says: also that something before it has failed.
    pub fn is_over(&self) -> Result<bool> {
        let driver = self.device.driver();
        let _current = self.device.enter()?;
        // SAFETY: the event is one of ours.
        match unsafe { (driver.functions.event_query)(self.event) } {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            code => driver.check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Waits until all before it is over, asleep.
    ///
    /// # Errors
    /// As [`is_over`](Self::is_over).
    pub fn wait(&self) -> Result<()> {
        let driver = self.device.driver();
        let _current = self.device.enter()?;
        // SAFETY: the event is one of ours.
        driver.check("cuEventSynchronize", unsafe { (driver.functions.event_synchronize)(self.event) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let current = self.device.enter();
        if current.is_ok() {
            // SAFETY: this is the only end of it; the driver keeps what a stream still needs of it.
            let _ = unsafe { (self.device.driver().functions.event_destroy)(self.event) };
        }
    }
}
