//! Host memory registered with the driver.

use std::fmt;
use std::sync::Arc;

use crate::device::Device;
use crate::error::Result;

/// `CU_MEMHOSTREGISTER_PORTABLE`: registered for all contexts, since one pool serves all GPUs.
const CU_MEMHOSTREGISTER_PORTABLE: u32 = 1;

/// Host memory that is registered with the driver while this value lives. Copies between it and a GPU are
/// asynchronous; copies of other host memory are staged and block.
pub struct HostRegistration {
    device: Arc<Device>,
    address: usize,
    /// Keeps the memory alive.
    _owner: Box<dyn Send + Sync>,
}

impl HostRegistration {
    /// Registers memory that `owner` keeps alive.
    ///
    /// # Errors
    /// The driver's error: the memory cannot be locked, or is already registered.
    ///
    /// # Safety
    /// While `owner` lives, `bytes` bytes at `address` are mapped memory of this process.
    pub unsafe fn new(device: &Arc<Device>, address: usize, bytes: usize, owner: Box<dyn Send + Sync>) -> Result<Self> {
        let driver = device.driver();
        let _current = device.enter()?;
        let start = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: the bytes are mapped while `owner` lives, as the caller of `new` ensures. This object keeps the owner
        // until `drop` has unregistered them, which fails only without a working context. The driver only pins them.
        let code = unsafe { (driver.functions.host_register)(start, bytes, CU_MEMHOSTREGISTER_PORTABLE) };
        driver.check("cuMemHostRegister", code)?;
        Ok(Self { device: Arc::clone(device), address, _owner: owner })
    }
}

impl Drop for HostRegistration {
    fn drop(&mut self) {
        let current = self.device.enter();
        if current.is_ok() {
            let start = std::ptr::with_exposed_provenance_mut(self.address);
            // SAFETY: `new` registered this memory, and its owner is dropped afterwards.
            let _ = unsafe { (self.device.driver().functions.host_unregister)(start) };
        }
    }
}

impl fmt::Debug for HostRegistration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostRegistration({:#x})", self.address)
    }
}
