//! A GPU and its context.

use std::ffi::c_int;
use std::marker::PhantomData;
use std::ptr;

use crate::abi::Handle;
use crate::driver::Driver;
use crate::error::Result;

/// A GPU with its primary context retained. The CUDA runtime uses the same context, so torch's streams and memory
/// belong to it.
#[derive(Debug)]
pub struct Device {
    driver: &'static Driver,
    index: u32,
    device: c_int,
    context: Handle,
}

// SAFETY: a context handle may be used from any thread; each use makes it current first.
unsafe impl Send for Device {}
// SAFETY: the value is immutable, and a context handle may be used from several threads: each use makes it current on
// its own thread.
unsafe impl Sync for Device {}

impl Device {
    /// Retains the primary context of a GPU, by CUDA's index of visible devices.
    ///
    /// # Errors
    /// The driver's error, for example that the device does not exist.
    pub fn new(driver: &'static Driver, index: u32) -> Result<Self> {
        let functions = &driver.functions;
        let (mut device, mut context) = (0, ptr::null_mut());
        let ordinal = c_int::try_from(index).unwrap_or(c_int::MAX);
        // SAFETY: both pointers are to local values.
        unsafe {
            driver.check("cuDeviceGet", (functions.device_get)(&raw mut device, ordinal))?;
            driver.check("cuDevicePrimaryCtxRetain", (functions.context_retain)(&raw mut context, device))?;
        }
        Ok(Self { driver, index, device, context })
    }

    /// Returns the device index.
    #[must_use]
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Returns the driver.
    #[must_use]
    pub fn driver(&self) -> &'static Driver {
        self.driver
    }

    /// Makes the device current on this thread until the guard is dropped.
    ///
    /// # Errors
    /// The driver's error.
    pub fn enter(&self) -> Result<Current<'_>> {
        // SAFETY: the guard borrows this value, which retains the context.
        self.driver.check("cuCtxPushCurrent", unsafe { (self.driver.functions.context_push)(self.context) })?;
        Ok(Current { device: self, on_this_thread: PhantomData })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: releases the context that `new` retained, once. An error means that the driver is shut down, and
        // the context with it.
        let _ = unsafe { (self.driver.functions.context_release)(self.device) };
    }
}

/// A device that is current on this thread.
#[derive(Debug)]
pub struct Current<'a> {
    device: &'a Device,
    /// The context must be popped on the same thread.
    on_this_thread: PhantomData<*const ()>,
}

impl Current<'_> {
    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.device
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut popped = ptr::null_mut();
        // SAFETY: the pointer is to a local value, and guards are dropped in reverse order.
        let _ = unsafe { (self.device.driver.functions.context_pop)(&raw mut popped) };
    }
}
