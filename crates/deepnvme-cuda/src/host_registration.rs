//! Host memory that the driver may copy from and to directly.

use std::fmt;
use std::sync::Arc;

use crate::device::Device;
use crate::error::Result;

/// For all contexts, since one pool serves all GPUs.
const PORTABLE: u32 = 1;

/// Host memory that is registered with the driver until this value is dropped: copies between it and a GPU run by
/// themselves, where those of other memory are staged and wait.
pub struct Registration {
    device: Arc<Device>,
    address: usize,
    /// Keeps the memory where it is.
    _owner: Box<dyn Send + Sync>,
}

impl Registration {
    /// Registers memory, which `owner` keeps alive.
    ///
    /// # Errors
    /// What the driver says: the memory cannot be locked, or is registered already.
    ///
    /// # Safety
    /// For as long as `owner` lives, `bytes` bytes at `address` are memory of this process, mapped as they are now.
    pub unsafe fn new(device: &Arc<Device>, address: usize, bytes: usize, owner: Box<dyn Send + Sync>) -> Result<Self> {
        let driver = device.driver();
        let _current = device.enter()?;
        let start = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: the caller says that it is memory, and stays it; the driver only pins it.
        let code = unsafe { (driver.functions.host_register)(start, bytes, PORTABLE) };
        driver.check("cuMemHostRegister", code)?;
        Ok(Self { device: Arc::clone(device), address, _owner: owner })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let current = self.device.enter();
        if current.is_ok() {
            let start = std::ptr::with_exposed_provenance_mut(self.address);
            // SAFETY: this memory was registered by `new`, and its owner is dropped after this.
            let _ = unsafe { (self.device.driver().functions.host_unregister)(start) };
        }
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registration({:#x})", self.address)
    }
}
