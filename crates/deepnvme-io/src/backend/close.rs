//! Closes a descriptor and returns the kernel's result.
#![allow(unsafe_code)]

use std::os::fd::{IntoRawFd, OwnedFd};

use rustix::io::Errno;

/// Closes a descriptor. It is closed even on failure.
///
/// # Errors
/// Errors of earlier writes, or of the close itself.
#[cfg_attr(simulated, allow(dead_code, reason = "a simulated world has no calls of its own to close"))]
pub(crate) fn close(file: OwnedFd) -> Result<(), Errno> {
    // SAFETY: the descriptor was owned, and nothing else has it from now on.
    if unsafe { libc::close(file.into_raw_fd()) } == 0 {
        return Ok(());
    }
    match Errno::from_io_error(&std::io::Error::last_os_error()) {
        Some(Errno::INTR) => Ok(()),
        errno => Err(errno.unwrap_or(Errno::IO)),
    }
}
