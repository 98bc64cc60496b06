//! A file registered with cuFile.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use super::CuFile;
use super::buffer::DeviceSpan;
use super::error::{IoError, IoResult, describe};
use super::functions::FileDescription;
use crate::abi::Handle;
use crate::capture::RelaxedCapture;
use crate::device::Device;
use crate::error::{Error, ErrorCode, Result};

/// A file that is registered with cuFile while this value lives. It has its own descriptor, so the original may be
/// closed.
pub struct FileHandle {
    cufile: CuFile,
    handle: Handle,
    _descriptor: OwnedFd,
}

// SAFETY: handles are thread-safe in cuFile.
unsafe impl Send for FileHandle {}
// SAFETY: a shared value only passes its handle to cuFile, whose handles are thread-safe.
unsafe impl Sync for FileHandle {}

impl FileHandle {
    /// Registers an open file, which should be open for direct I/O.
    ///
    /// # Errors
    /// cuFile's error, for example an unsupported file system, or the kernel's if the descriptor cannot be duplicated.
    pub fn new(cufile: &CuFile, file: BorrowedFd<'_>) -> Result<Self> {
        let no_descriptor = |error: std::io::Error| Error {
            call: "dup",
            code: ErrorCode::Os(error.raw_os_error().unwrap_or(0)),
            text: error.to_string(),
        };
        let descriptor = file.try_clone_to_owned().map_err(no_descriptor)?;
        let (mut handle, mut description) = (ptr::null_mut(), FileDescription::of(descriptor.as_raw_fd()));
        let _capture = RelaxedCapture::enter(cufile.session.driver);
        // SAFETY: both pointers are to local values, not used after the call returns.
        let status = unsafe { (cufile.functions().handle_register)(&raw mut handle, &raw mut description) };
        cufile.check("cuFileHandleRegister", status)?;
        Ok(Self { cufile: cufile.clone(), handle, _descriptor: descriptor })
    }

    pub(super) fn handle(&self) -> Handle {
        self.handle
    }

    /// Reads bytes of the file into memory of the device. Blocks, and returns the bytes read.
    ///
    /// # Errors
    /// The error of the kernel, of cuFile, or of the device's context.
    ///
    /// # Safety
    /// Until this returns, the span is memory of this device with no other access.
    pub unsafe fn read(&self, device: &Arc<Device>, span: DeviceSpan, offset: u64) -> IoResult {
        let (read, base) = (self.cufile.functions().read, ptr::with_exposed_provenance_mut(span.base));
        // SAFETY: `self` keeps the handle registered. The span is memory of this device with no other access until the
        // call returns, as the caller of `read` ensures.
        in_context(device, || unsafe { read(self.handle, base, span.bytes, offset as i64, span.offset_in_base as i64) })
    }

    /// Writes memory of the device to the file. Blocks, and returns the bytes written.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    ///
    /// # Safety
    /// Until this returns, the span is memory of this device that is not written.
    pub unsafe fn write(&self, device: &Arc<Device>, span: DeviceSpan, offset: u64) -> IoResult {
        let (write, base) = (self.cufile.functions().write, ptr::with_exposed_provenance(span.base));
        // SAFETY: `self` keeps the handle registered. The span is memory of this device that nothing writes until the
        // call returns, as the caller of `write` ensures.
        in_context(device, || unsafe {
            write(self.handle, base, span.bytes, offset as i64, span.offset_in_base as i64)
        })
    }
}

impl Drop for FileHandle {
    fn drop(&mut self) {
        let _capture = RelaxedCapture::enter(self.cufile.session.driver);
        // SAFETY: it was registered once. `read` and `write` borrow it, and the callers of `Batch::submit` keep it
        // until its transfers are reported.
        unsafe { (self.cufile.functions().handle_deregister)(self.handle) }
    }
}

impl fmt::Debug for FileHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FileHandle({:p})", self.handle)
    }
}

/// Calls with the device's context current, and converts the result.
fn in_context(device: &Device, call: impl FnOnce() -> isize) -> IoResult {
    let _current = device.enter().map_err(IoError::Device)?;
    outcome(call())
}

/// Converts a result. Minus one means that `errno` has the reason.
fn outcome(status: isize) -> IoResult {
    match status {
        -1 => Err(IoError::Kernel(io::Error::last_os_error().raw_os_error().unwrap_or(5))),
        ..-1 => {
            let code = status.unsigned_abs() as i32;
            Err(IoError::CuFile(code, describe(code)))
        }
        bytes => Ok(bytes as usize),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_converted() {
        assert_eq!(outcome(0).unwrap(), 0);
        assert_eq!(outcome(4096).unwrap(), 4096);
        let error = outcome(-5036).unwrap_err();
        assert_eq!(error.to_string(), "cuFile: no more GPU memory can be pinned (5036)");
        assert!(matches!(outcome(-1).unwrap_err(), IoError::Kernel(_)));
    }
}
