//! GPUs that this process uses already, found without loading or initialising the driver.
//!
//! In a process without the driver, a call only checks whether the process has loaded more libraries since the last
//! search.

use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;

use crate::capture::RelaxedCapture;
use crate::device::Device;
use crate::driver::Driver;
use crate::error::SUCCESS;
use crate::stream::RawStream;

/// Returns the first GPU whose primary context exists, such as torch's once torch has used it. `None` if there is no
/// such GPU, if this process has not initialised the driver, or in a forked child of one that has. Creates no context.
#[must_use]
pub fn active_device() -> Option<Arc<Device>> {
    let driver = Driver::initialised()?;
    let count = driver.device_count().ok()?;
    let index = (0..count).find(|index| is_active(driver, *index))?;
    Device::new(driver, index).ok().map(Arc::new)
}

/// Returns the GPU whose context is current on this thread, as torch sets it. `None` if there is none.
#[must_use]
pub fn current_device() -> Option<u32> {
    let driver = Driver::initialised()?;
    let mut device = 0;
    // SAFETY: the pointer is to a local value. Without a context the call only fails.
    let code = unsafe { (driver.functions.context_device)(&raw mut device) };
    // A device is its own ordinal.
    if code == SUCCESS { u32::try_from(device).ok() } else { None }
}

/// Waits for all work of a stream of the GPU that is current on this thread. Ends at once if there is none, if the
/// stream is being captured (what is captured does not run yet), or if its work has failed.
pub fn wait_for_stream(stream: RawStream<'_>) {
    let Some(driver) = Driver::initialised() else { return };
    let _capture = RelaxedCapture::enter(driver);
    let _ = stream.wait(driver);
}

fn is_active(driver: &Driver, index: u32) -> bool {
    let functions = &driver.functions;
    let (mut device, mut flags, mut active) = (0, 0, 0);
    // SAFETY: all pointers are to local values.
    let code = unsafe {
        match (functions.device_get)(&raw mut device, index as c_int) {
            SUCCESS => (functions.context_state)(device, ptr::from_mut(&mut flags), &raw mut active),
            code => code,
        }
    };
    code == SUCCESS && active != 0
}
