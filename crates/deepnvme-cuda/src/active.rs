//! GPUs that this process uses already, found without loading or initialising the driver.

use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;

use crate::device::Device;
use crate::driver::Driver;
use crate::error::SUCCESS;

/// Returns the first GPU whose primary context exists, such as torch's once torch has used it. `None` if this process
/// has not initialised the driver, or in a forked child of one that has. Creates no context.
#[must_use]
pub fn active_device() -> Option<Arc<Device>> {
    let driver = Driver::initialised()?;
    let count = driver.device_count().ok()?;
    let index = (0..count).find(|index| is_active(driver, *index))?;
    Device::new(driver, index).ok().map(Arc::new)
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
