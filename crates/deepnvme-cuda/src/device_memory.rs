//! Memory on a GPU that is this program's own.

use std::sync::Arc;

use crate::abi::DevicePointer;
use crate::device::Device;
use crate::error::Result;

/// Memory on a GPU, given back when this is dropped. What it holds at first is whatever was there before.
#[derive(Debug)]
pub struct Memory {
    device: Arc<Device>,
    address: DevicePointer,
}

impl Memory {
    /// So many bytes, or one where none are asked for.
    ///
    /// # Errors
    /// What the driver says, above all that there is not so much left.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<Self> {
        let driver = device.driver();
        let _current = device.enter()?;
        let mut address = 0;
        // SAFETY: the pointer is to a number of ours, and the device's context is the current one.
        let code = unsafe { (driver.functions.memory_allocate)(&raw mut address, bytes.max(1)) };
        driver.check("cuMemAlloc", code)?;
        Ok(Self { device: Arc::clone(device), address })
    }

    /// Where it begins, on the GPU.
    #[must_use]
    pub fn address(&self) -> usize {
        self.address as usize
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let current = self.device.enter();
        if current.is_ok() {
            // SAFETY: it was allocated by `new`, in this context, and nobody else frees it. An error means that the
            // context is dead, and the memory gone with it.
            let _ = unsafe { (self.device.driver().functions.memory_free)(self.address) };
        }
    }
}
