//! Memory of a GPU that cuFile knows.

use std::fmt;
use std::ptr;
use std::sync::Arc;

use super::CuFile;
use crate::device::Device;
use crate::error::Result;

/// Memory of a GPU that is registered with cuFile until this is dropped: the disk writes straight into it, where it else goes
/// through memory of cuFile's own on the GPU.
pub struct BufferRegistration {
    cufile: CuFile,
    device: Arc<Device>,
    address: usize,
    /// Keeps the memory where it is.
    _owner: Box<dyn Send + Sync>,
}

impl BufferRegistration {
    /// Registers memory of a device, which `owner` keeps alive.
    ///
    /// # Errors
    /// What cuFile says: that it is registered already, or that the GPU's window is full.
    ///
    /// # Safety
    /// For as long as `owner` lives, `bytes` bytes at `address` are memory of this device.
    pub unsafe fn new(
        cufile: &CuFile,
        device: &Arc<Device>,
        address: usize,
        bytes: usize,
        owner: Box<dyn Send + Sync>,
    ) -> Result<Self> {
        let _current = device.enter()?;
        let memory = ptr::with_exposed_provenance(address);
        // SAFETY: the caller says that it is memory, and stays it.
        let answer = unsafe { (cufile.functions().buffer_register)(memory, bytes, 0) };
        cufile.check("cuFileBufRegister", answer)?;
        Ok(Self { cufile: cufile.clone(), device: Arc::clone(device), address, _owner: owner })
    }
}

impl Drop for BufferRegistration {
    fn drop(&mut self) {
        let current = self.device.enter();
        if current.is_ok() {
            let memory = ptr::with_exposed_provenance(self.address);
            // SAFETY: this memory was registered by `new`, and its owner is dropped after this.
            let _ = unsafe { (self.cufile.functions().buffer_deregister)(memory) };
        }
    }
}

impl fmt::Debug for BufferRegistration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufferRegistration({:#x})", self.address)
    }
}
