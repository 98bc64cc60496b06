//! Counts the pages of a file in the page cache.
#![allow(unsafe_code)]

use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::op::Errno;

/// `cachestat`, since Linux 6.5. The number is the same on x86-64, AArch64 and RISC-V.
const SYS_CACHESTAT: libc::c_long = 451;

#[repr(C)]
struct CachestatRange {
    off: u64,
    len: u64,
}

#[repr(C)]
#[derive(Default)]
struct Cachestat {
    nr_cache: u64,
    nr_dirty: u64,
    nr_writeback: u64,
    nr_evicted: u64,
    nr_recently_evicted: u64,
}

/// Returns how many pages of a byte range are in the page cache.
///
/// # Errors
/// The kernel's error if it does not report it: before Linux 6.5, in a sandbox, or for another user's files.
pub(crate) fn cached_pages(fd: BorrowedFd<'_>, range: &Range<u64>) -> Result<u64, Errno> {
    if range.is_empty() {
        return Ok(0);
    }
    let mut range = CachestatRange { off: range.start, len: range.end - range.start };
    let mut found = Cachestat::default();
    // SAFETY: both structs have the kernel's layout and live for the call. The borrowed descriptor is open.
    let answer = unsafe { libc::syscall(SYS_CACHESTAT, fd.as_raw_fd(), &raw mut range, &raw mut found, 0_u32) };
    if answer == 0 {
        return Ok(found.nr_cache);
    }
    Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::NOSYS))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_file_that_was_just_written_is_cached_and_its_holes_are_not() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 10 * 4096]).unwrap();
        file.set_len(100 * 4096).unwrap();
        let Ok(pages) = cached_pages(file.as_fd(), &(0..10 * 4096)) else { return };
        let page_bytes = rustix::param::page_size() as u64;
        assert_eq!(pages, 10 * 4096 / page_bytes);
        assert_eq!(cached_pages(file.as_fd(), &(50 * 4096..100 * 4096)), Ok(0));
        assert_eq!(cached_pages(file.as_fd(), &(5000..5001)), Ok(1), "a part of a page is the page");
        assert_eq!(cached_pages(file.as_fd(), &(0..0)), Ok(0));
    }
}
