//! A file that cuFile knows.

use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use super::CuFile;
use super::functions::Description;
use super::span::DeviceSpan;
use super::transfer::{self, IoError};
use crate::abi::Handle;
use crate::device::Device;
use crate::error::{Error, Result};

/// A file that is registered with cuFile until this is dropped. It has a descriptor of its own, so that the other one may be
/// closed before.
pub struct FileHandle {
    cufile: CuFile,
    handle: Handle,
    _descriptor: OwnedFd,
}

// SAFETY: cuFile lets any thread use a handle.
unsafe impl Send for FileHandle {}
// SAFETY: as above.
unsafe impl Sync for FileHandle {}

impl FileHandle {
    /// Registers an open file. It ought to be open for direct I/O.
    ///
    /// # Errors
    /// What cuFile says, above all of file systems that it does not know.
    pub fn new(cufile: &CuFile, file: BorrowedFd<'_>) -> Result<Self> {
        let no_descriptor = |error: std::io::Error| Error {
            call: "dup",
            code: error.raw_os_error().unwrap_or(0),
            text: error.to_string(),
        };
        let descriptor = file.try_clone_to_owned().map_err(no_descriptor)?;
        let (mut handle, mut description) = (ptr::null_mut(), Description::of(descriptor.as_raw_fd()));
        // SAFETY: both pointers are to values of ours, which cuFile has read and written when it returns.
        let answer = unsafe { (cufile.functions().handle_register)(&raw mut handle, &raw mut description) };
        cufile.check("cuFileHandleRegister", answer)?;
        Ok(Self { cufile: cufile.clone(), handle, _descriptor: descriptor })
    }

    pub(super) fn handle(&self) -> Handle {
        self.handle
    }

    /// Reads bytes of the file into memory of the device, and waits for that; how many came.
    ///
    /// # Errors
    /// What the kernel or cuFile refused.
    ///
    /// # Safety
    /// Until this returns, the span is memory of this device that nothing else uses.
    pub unsafe fn read(
        &self,
        device: &Arc<Device>,
        span: DeviceSpan,
        offset: u64,
    ) -> std::result::Result<usize, IoError> {
        let (read, base) = (self.cufile.functions().read, ptr::with_exposed_provenance_mut(span.base));
        // SAFETY: passed on to the caller.
        transfer::on(device, || unsafe { read(self.handle, base, span.bytes, offset as i64, span.skip as i64) })
    }

    /// Writes bytes of the device's memory to the file, and waits for that; how many went.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    ///
    /// # Safety
    /// Until this returns, the span is memory of this device that nothing writes.
    pub unsafe fn write(
        &self,
        device: &Arc<Device>,
        span: DeviceSpan,
        offset: u64,
    ) -> std::result::Result<usize, IoError> {
        let (write, base) = (self.cufile.functions().write, ptr::with_exposed_provenance(span.base));
        // SAFETY: passed on to the caller.
        transfer::on(device, || unsafe { write(self.handle, base, span.bytes, offset as i64, span.skip as i64) })
    }
}

impl Drop for FileHandle {
    fn drop(&mut self) {
        // SAFETY: it was registered once, and transfers borrow it.
        unsafe { (self.cufile.functions().handle_deregister)(self.handle) }
    }
}

impl fmt::Debug for FileHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FileHandle({:p})", self.handle)
    }
}
