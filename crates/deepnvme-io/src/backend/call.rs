//! Performs one op with one system call.
#![allow(unsafe_code)]

use std::os::fd::AsRawFd;

use smallvec::SmallVec;

use super::op_slots::result_of;
use crate::op::{Errno, Op, OpKind};

/// File offsets can exceed 32 bits, so this crate requires a 64-bit `off_t`.
const _: () = assert!(size_of::<libc::off_t>() == 8);

/// Maximum iovecs that fit on the stack.
const IOVECS_INLINE: usize = 16;

/// Performs the op with one call and returns its result. EINTR and short transfers are ordinary results.
pub(crate) fn perform(op: &Op) -> Result<usize, Errno> {
    match op.kind {
        OpKind::SyncData => rustix::fs::fdatasync(&op.file).map(|()| 0),
        OpKind::SyncAll => rustix::fs::fsync(&op.file).map(|()| 0),
        OpKind::Read | OpKind::Write => transfer(op),
    }
}

fn transfer(op: &Op) -> Result<usize, Errno> {
    let iovecs: SmallVec<[libc::iovec; IOVECS_INLINE]> = op
        .iovecs
        .iter()
        .map(|iovec| libc::iovec { iov_base: iovec.addr() as *mut libc::c_void, iov_len: iovec.len() })
        .collect();
    let (fd, offset) = (op.file.as_raw_fd(), op.offset as libc::off_t);
    let count = iovecs.len() as libc::c_int;
    // SAFETY: `iovecs` lives until the call returns and has `count` entries. The op keeps its file open and its memory
    // alive. The submitter of a read ensures that its memory is writable.
    let moved = unsafe {
        match op.kind {
            OpKind::Read => libc::preadv(fd, iovecs.as_ptr(), count, offset),
            _ => libc::pwritev(fd, iovecs.as_ptr(), count, offset),
        }
    };
    if moved < 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    result_of(moved as i64)
}
