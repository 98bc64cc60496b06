//! Events: points in a stream.

use std::sync::Arc;
use std::time::Duration;

use crate::backoff::poll;
use crate::context_object::ContextObject;
use crate::device::Device;
use crate::driver::{Driver, Functions};
use crate::error::{Error, NOT_READY, Result, SUCCESS};
use crate::stream::RawStream;

/// No timestamps, which would cost a memory write.
const DISABLE_TIMING: u32 = 2;

/// A point in a stream that can be queried and waited for.
#[derive(Debug)]
pub struct Event(ContextObject);

impl Event {
    /// Creates an event. It counts as complete until it is recorded.
    ///
    /// # Errors
    /// The driver's error.
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        let Functions { event_create, event_destroy, .. } = device.driver().functions;
        // SAFETY: the two functions belong together.
        unsafe { ContextObject::new(device, "cuEventCreate", event_create, DISABLE_TIMING, event_destroy) }.map(Self)
    }

    /// Records this event on the stream.
    ///
    /// # Errors
    /// The driver's error, for example that the device has no such stream.
    pub fn record(&self, stream: RawStream<'_>) -> Result<()> {
        let (driver, _current) = self.0.enter()?;
        // SAFETY: this object keeps the event alive. The code that made the handle of the stream keeps the stream alive
        // until its last use (`RawStream::from_handle`).
        let code = unsafe { (driver.functions.event_record)(self.0.handle(), stream.handle()) };
        driver.check("cuEventRecord", code)
    }

    /// Returns whether all work before it is complete.
    ///
    /// # Errors
    /// The driver's error, including errors of earlier work.
    pub fn is_complete(&self) -> Result<bool> {
        let (driver, _current) = self.0.enter()?;
        self.query(driver)
    }

    /// Waits until all work before it is complete: polls for as long as a small copy takes, then sleeps between polls.
    ///
    /// # Errors
    /// As [`is_complete`](Self::is_complete), and [`ErrorCode::TimedOut`](crate::ErrorCode::TimedOut) after `limit`.
    pub fn wait(&self, limit: Duration) -> Result<()> {
        let (driver, _current) = self.0.enter()?;
        if poll(limit, || self.query(driver))? { Ok(()) } else { Err(Error::timed_out("cuEventQuery", limit)) }
    }

    /// Queries the event. The caller has made its device current.
    fn query(&self, driver: &Driver) -> Result<bool> {
        // SAFETY: this object keeps the event alive.
        match unsafe { (driver.functions.event_query)(self.0.handle()) } {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            code => driver.check("cuEventQuery", code).map(|()| true),
        }
    }
}
