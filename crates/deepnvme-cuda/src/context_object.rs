//! Objects that belong to a device's context: streams and events.

use std::ffi::{c_int, c_uint};
use std::ptr;
use std::sync::Arc;

use crate::abi::Handle;
use crate::device::{Current, Device};
use crate::driver::Driver;
use crate::error::Result;

/// An object of a device's context, destroyed when it is dropped.
#[derive(Debug)]
pub(crate) struct ContextObject {
    device: Arc<Device>,
    handle: Handle,
    destroy: unsafe extern "C" fn(Handle) -> c_int,
}

// SAFETY: the driver's streams and events are thread-safe.
unsafe impl Send for ContextObject {}
// SAFETY: a shared object only lends its handle, and the driver's streams and events are thread-safe.
unsafe impl Sync for ContextObject {}

impl ContextObject {
    /// Creates an object with the driver's function `create`, named `call`.
    ///
    /// # Safety
    /// `create` stores the handle of a new object and takes these flags, and `destroy` destroys such an object.
    pub(crate) unsafe fn new(
        device: &Arc<Device>,
        call: &'static str,
        create: unsafe extern "C" fn(*mut Handle, c_uint) -> c_int,
        flags: c_uint,
        destroy: unsafe extern "C" fn(Handle) -> c_int,
    ) -> Result<Self> {
        let _current = device.enter()?;
        let mut handle = ptr::null_mut();
        // SAFETY: the pointer is to a local value, the device is current, and the caller of `new` chose the flags.
        let code = unsafe { create(&raw mut handle, flags) };
        device.driver().check(call, code)?;
        Ok(Self { device: Arc::clone(device), handle, destroy })
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Returns the handle, valid until this is dropped.
    pub(crate) fn handle(&self) -> Handle {
        self.handle
    }

    /// Makes the device current, for calls of the driver.
    pub(crate) fn enter(&self) -> Result<(&'static Driver, Current<'_>)> {
        Ok((self.device.driver(), self.device.enter()?))
    }
}

impl Drop for ContextObject {
    fn drop(&mut self) {
        let current = self.device.enter();
        if current.is_ok() {
            // SAFETY: only this drop destroys the handle, and its device is current. The driver completes queued work
            // first, and keeps what a stream still needs.
            let _ = unsafe { (self.destroy)(self.handle) };
        }
    }
}
