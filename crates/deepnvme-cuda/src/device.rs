//! One GPU, and its context on the thread that needs it.

use std::ffi::c_int;
use std::marker::PhantomData;
use std::ptr;

use crate::abi::Handle;
use crate::driver::Driver;
use crate::error::Result;

/// A GPU, with its primary context held: that is the one of the CUDA runtime, so that torch's streams and memory are
/// in it.
#[derive(Debug)]
pub struct Device {
    driver: &'static Driver,
    index: u32,
    device: c_int,
    context: Handle,
}

// SAFETY: a context handle may be used from any thread; each use makes it current there first.
unsafe impl Send for Device {}
// SAFETY: as above, and nothing of the value changes after it is made.
unsafe impl Sync for Device {}

impl Device {
    /// The GPU of that number, as CUDA counts those that it may see.
    ///
    /// # Errors
    /// What the driver says, above all that there is no such device.
    pub fn new(driver: &'static Driver, index: u32) -> Result<Self> {
        let functions = &driver.functions;
        let (mut device, mut context) = (0, ptr::null_mut());
        let ordinal = c_int::try_from(index).unwrap_or(c_int::MAX);
        // SAFETY: both pointers are to values of ours.
        unsafe {
            driver.check("cuDeviceGet", (functions.device_get)(&raw mut device, ordinal))?;
            driver.check("cuDevicePrimaryCtxRetain", (functions.context_retain)(&raw mut context, device))?;
        }
        Ok(Self { driver, index, device, context })
    }

    /// Which one it is.
    #[must_use]
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The driver that it belongs to.
    #[must_use]
    pub fn driver(&self) -> &'static Driver {
        self.driver
    }

    /// Makes it this thread's current one, until the value is dropped.
    ///
    /// # Errors
    /// What the driver says.
    pub fn enter(&self) -> Result<Current<'_>> {
        // SAFETY: the context is held for as long as this value lives, which the guard borrows.
        self.driver.check("cuCtxPushCurrent", unsafe { (self.driver.functions.context_push)(self.context) })?;
        Ok(Current { device: self, on_this_thread: PhantomData })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: this gives back what `new` has taken, once. An error means that the driver is gone, and the context
        // with it.
        let _ = unsafe { (self.driver.functions.context_release)(self.device) };
    }
}

/// A device that is the current one of this thread.
#[derive(Debug)]
pub struct Current<'a> {
    device: &'a Device,
    /// The context must be popped on the thread that has pushed it.
    on_this_thread: PhantomData<*const ()>,
}

impl Current<'_> {
    /// Which one.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.device
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut popped = ptr::null_mut();
        // SAFETY: the pointer is to a value of ours, and guards are dropped in the reverse order of their making.
        let _ = unsafe { (self.device.driver.functions.context_pop)(&raw mut popped) };
    }
}
