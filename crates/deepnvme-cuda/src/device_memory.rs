//! Memory allocated on a GPU.

use std::sync::Arc;

use crate::abi::DevicePointer;
use crate::device::Device;
use crate::error::Result;

/// Memory on a GPU, freed when dropped. It is uninitialised at first.
#[derive(Debug)]
pub struct DeviceMemory {
    device: Arc<Device>,
    address: DevicePointer,
}

impl DeviceMemory {
    /// Allocates `bytes`, or one byte if zero.
    ///
    /// # Errors
    /// The driver's error, usually that the memory is not available.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<Self> {
        let driver = device.driver();
        let _current = device.enter()?;
        let mut address = 0;
        // SAFETY: the pointer is to a local value, and the device is current.
        let code = unsafe { (driver.functions.memory_allocate)(&raw mut address, bytes.max(1)) };
        driver.check("cuMemAlloc", code)?;
        Ok(Self { device: Arc::clone(device), address })
    }

    /// Returns the address on the GPU.
    #[must_use]
    pub fn address(&self) -> usize {
        self.address as usize
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let current = self.device.enter();
        if current.is_ok() {
            // SAFETY: `new` allocated it in this context, and it is freed once. An error means that the context is
            // dead, and the memory with it.
            let _ = unsafe { (self.device.driver().functions.memory_free)(self.address) };
        }
    }
}
