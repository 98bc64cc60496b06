//! Stream capture: calls on a thread must not invalidate a CUDA graph that another one records.

use std::ffi::c_int;
use std::marker::PhantomData;

use crate::driver::Driver;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`: captures prohibit no call of this thread.
const RELAXED: c_int = 2;
/// `CU_STREAM_CAPTURE_STATUS_NONE`.
pub(crate) const NOT_CAPTURING: c_int = 0;

/// Sets the capture mode of this thread to relaxed until the guard is dropped.
///
/// In the driver's default mode, a capture that any thread began in global mode (torch's default) prohibits queries,
/// waits, allocations and registrations on all threads. Such a call fails, and invalidates the capture.
#[derive(Debug)]
pub(crate) struct RelaxedCapture {
    driver: &'static Driver,
    /// `None` if the driver refused the change.
    before: Option<c_int>,
    /// The mode belongs to the thread.
    on_this_thread: PhantomData<*const ()>,
}

impl RelaxedCapture {
    pub(crate) fn enter(driver: &'static Driver) -> Self {
        Self { driver, before: exchange(driver, RELAXED), on_this_thread: PhantomData }
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            exchange(self.driver, before);
        }
    }
}

/// Sets the capture mode of this thread (`CUstreamCaptureMode`), and returns the previous one. `None` if this process
/// has not initialised the driver, or the driver refuses.
#[must_use]
pub fn exchange_capture_mode(mode: i32) -> Option<i32> {
    exchange(Driver::initialised()?, mode)
}

/// Sets the mode, and returns the previous one; `None` if the driver refuses.
fn exchange(driver: &Driver, mode: c_int) -> Option<c_int> {
    let mut mode = mode;
    // SAFETY: the pointer is to a local value.
    let code = unsafe { (driver.functions.capture_mode_exchange)(&raw mut mode) };
    driver.check("cuThreadExchangeStreamCaptureMode", code).ok().map(|()| mode)
}
