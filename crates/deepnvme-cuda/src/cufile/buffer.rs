//! GPU memory registered with cuFile.

use std::fmt;
use std::ptr;
use std::sync::Arc;

use super::CuFile;
use crate::device::Device;
use crate::error::Result;

/// GPU memory that is registered with cuFile while this value lives. The disk writes directly to it; other memory
/// goes through cuFile's own buffers on the GPU.
pub struct BufferRegistration {
    cufile: CuFile,
    device: Arc<Device>,
    address: usize,
    /// Keeps the memory alive.
    _owner: Box<dyn Send + Sync>,
}

impl BufferRegistration {
    /// Registers memory of a device that `owner` keeps alive.
    ///
    /// # Errors
    /// cuFile's error: the memory is already registered, or the GPU's BAR window is full.
    ///
    /// # Safety
    /// While `owner` lives, `bytes` bytes at `address` are memory of this device.
    pub unsafe fn new(
        cufile: &CuFile,
        device: &Arc<Device>,
        address: usize,
        bytes: usize,
        owner: Box<dyn Send + Sync>,
    ) -> Result<Self> {
        let _current = device.enter()?;
        let memory = ptr::with_exposed_provenance(address);
        // SAFETY: the bytes are memory of this device while `owner` lives, as the caller of `new` ensures. This object
        // keeps the owner until `drop` has deregistered them, which fails only without a working context.
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
            // SAFETY: `new` registered this memory, and its owner is dropped afterwards.
            let _ = unsafe { (self.cufile.functions().buffer_deregister)(memory) };
        }
    }
}

impl fmt::Debug for BufferRegistration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufferRegistration({:#x})", self.address)
    }
}

/// A range of GPU memory, as an offset from its registered base. cuFile identifies registered memory by its first
/// byte only, and treats any other address as unregistered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceSpan {
    /// Start of the registered memory; of unregistered memory, the start of the range.
    pub base: usize,
    /// Bytes from `base` to the start of the range.
    pub offset_in_base: usize,
    /// Length of the range in bytes.
    pub bytes: usize,
}

impl DeviceSpan {
    /// Creates a range of unregistered memory.
    #[must_use]
    pub const fn unregistered(address: usize, bytes: usize) -> Self {
        Self { base: address, offset_in_base: 0, bytes }
    }
}
