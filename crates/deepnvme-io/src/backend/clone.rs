//! Shares bytes between two files without a copy.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

/// Makes `len` bytes of `target` share the blocks of `source` (`FICLONERANGE`). XFS and Btrfs support it within one
/// file system, if both offsets and the length are multiples of its block size. Later changes to either file do not
/// affect the other.
///
/// # Errors
/// `OPNOTSUPP` and `XDEV` if the file system does not support it. `INVAL` if the range is not in whole blocks. Other
/// refusals of the kernel.
pub fn clone_range(
    source: BorrowedFd<'_>,
    source_offset: u64,
    target: BorrowedFd<'_>,
    target_offset: u64,
    len: u64,
) -> Result<(), Errno> {
    if len == 0 {
        // The kernel interprets 0 as the whole file.
        return Ok(());
    }
    let range = libc::file_clone_range {
        src_fd: i64::from(source.as_raw_fd()),
        src_offset: source_offset,
        src_length: len,
        dest_offset: target_offset,
    };
    // SAFETY: the struct has the kernel's layout and lives for the call, which changes no memory. Both descriptors are
    // open.
    let answer = unsafe { libc::ioctl(target.as_raw_fd(), libc::FICLONERANGE, &raw const range) };
    if answer == 0 {
        return Ok(());
    }
    Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn shares_bytes_or_says_why_not() {
        let (mut source, mut target) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        source.write_all(&[7; 3 * 65536]).unwrap();
        target.write_all(&[1; 65536]).unwrap();
        assert_eq!(clone_range(source.as_fd(), 0, target.as_fd(), 0, 0), Ok(()), "of nothing, nothing");
        let cloned = clone_range(source.as_fd(), 65536, target.as_fd(), 0, 65536);
        let mut bytes = Vec::new();
        target.rewind().unwrap();
        target.read_to_end(&mut bytes).unwrap();
        match cloned {
            Ok(()) => assert_eq!(bytes, [7; 65536]),
            Err(errno) => {
                assert!([Errno::OPNOTSUPP, Errno::XDEV, Errno::INVAL, Errno::NOTTY].contains(&errno), "{errno}");
                assert_eq!(bytes, [1; 65536], "a refusal changes nothing");
            }
        }
    }
}
