//! A registered file.

use std::fs::OpenOptions;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::OnceLock;
use std::{fs, mem};

use crate::abi::cufile::{FileOutcome, INVALID_FILE_TYPE, INVALID_VALUE};

/// A registered file. The caller keeps the descriptor open.
#[derive(Debug)]
pub(crate) struct File {
    pub(crate) fd: RawFd,
    /// Whether its bytes are copied through the host (compatibility mode).
    pub(crate) is_copied: bool,
    /// Device and inode, which must not change while registered.
    identity: (u64, u64),
    /// The descriptor's flags of access.
    flags: i32,
    /// The same file opened without `O_DIRECT`, for unaligned transfers.
    buffered: OnceLock<Option<fs::File>>,
}

impl File {
    /// Checks a descriptor.
    pub(crate) fn new(fd: RawFd) -> FileOutcome<Self> {
        // SAFETY: asks for flags; a number that is no descriptor is refused by the kernel.
        let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
        let status = status_of(fd).filter(|_| flags >= 0).ok_or(INVALID_VALUE)?;
        if status.st_mode & libc::S_IFMT != libc::S_IFREG {
            return Err(INVALID_FILE_TYPE);
        }
        Ok(Self { fd, is_copied: false, identity: (status.st_dev, status.st_ino), flags, buffered: OnceLock::new() })
    }

    /// Returns whether the descriptor is still the registered file.
    pub(crate) fn is_same(&self) -> bool {
        status_of(self.fd).is_some_and(|status| (status.st_dev, status.st_ino) == self.identity)
    }

    /// Returns a descriptor for a call that direct I/O would refuse.
    pub(crate) fn unaligned(&self) -> RawFd {
        if self.flags & libc::O_DIRECT == 0 {
            return self.fd;
        }
        let access = self.flags & libc::O_ACCMODE;
        let open = || {
            let (reads, writes) = (access != libc::O_WRONLY, access != libc::O_RDONLY);
            OpenOptions::new().read(reads).write(writes).open(format!("/proc/self/fd/{}", self.fd)).ok()
        };
        self.buffered.get_or_init(open).as_ref().map_or(self.fd, AsRawFd::as_raw_fd)
    }
}

fn status_of(fd: RawFd) -> Option<libc::stat> {
    // SAFETY: `fstat` fills this struct, of which all zeros is a valid value.
    unsafe {
        let mut status: libc::stat = mem::zeroed();
        (libc::fstat(fd, &raw mut status) == 0).then_some(status)
    }
}
