//! One transfer, moved by several system calls on the caller's descriptor.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use super::file::File;
use crate::abi::Device;
use crate::access::Access;
use crate::rng::Rng;
use crate::state::mapped_range::MappedRange;
use crate::state::memory::page_bytes;

/// Alignment that direct I/O requires of offsets, sizes and addresses.
pub(crate) const ALIGNMENT: u64 = 4096;
/// The maximum number of pages of a call.
const CALL_PAGES_MAX: u64 = 32;

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write,
}

/// A checked transfer, with everything that it needs.
pub(crate) struct Transfer {
    pub(crate) direction: Direction,
    pub(crate) file: Arc<File>,
    pub(crate) range: MappedRange,
    pub(crate) device: Option<Device>,
    pub(crate) bytes: usize,
    pub(crate) file_offset: i64,
    pub(crate) used: Access,
    pub(crate) rng: Rng,
    pub(crate) delay: Duration,
}

impl Direction {
    /// Returns the fault point that makes a transfer short.
    pub(crate) fn short_fault(self) -> &'static str {
        match self {
            Self::Read => "cuFileRead@short",
            Self::Write => "cuFileWrite@short",
        }
    }
}

impl Transfer {
    /// Moves at most `limit` bytes. Returns their number, or an errno.
    pub(crate) fn move_bytes(&mut self, limit: usize) -> Result<usize, i32> {
        let mut done = 0;
        while done < limit {
            let pages = 1 + self.rng.below(CALL_PAGES_MAX) as usize;
            match self.move_some(done, (pages * page_bytes()).min(limit - done)) {
                Ok(0) => break,
                Ok(moved) => done += moved,
                Err(libc::EINTR) => (),
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    fn move_some(&self, from: usize, bytes: usize) -> Result<usize, i32> {
        let memory = self.range.part(from);
        let offset = self.file_offset + from as i64;
        let numbers = [memory.addr() as u64, offset as u64, bytes as u64];
        let aligned = numbers.iter().all(|number| number % ALIGNMENT == 0);
        let fd = if aligned { self.file.fd } else { self.file.unaligned() };
        match self.call(fd, memory, offset, bytes) {
            // Some devices want more than a page.
            Err(libc::EINVAL) if aligned => self.call(self.file.unaligned(), memory, offset, bytes),
            moved => moved,
        }
    }

    fn call(&self, fd: RawFd, memory: *mut u8, offset: i64, bytes: usize) -> Result<usize, i32> {
        // SAFETY: the range was checked against its allocation, and keeps that allocation.
        let moved = unsafe {
            match self.direction {
                Direction::Read => libc::pread(fd, memory.cast(), bytes, offset),
                Direction::Write => libc::pwrite(fd, memory.cast(), bytes, offset),
            }
        };
        usize::try_from(moved).map_err(|_| std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
    }
}
