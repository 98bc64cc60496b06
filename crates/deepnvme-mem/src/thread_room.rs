//! Room in memory for threads that are about to be started.

use std::io;

use rustix::mm::MapFlags;

use crate::mapping::Mapping;

/// The stack of a thread, and more than enough for all that is allocated before its work begins.
const THREAD_BYTES: usize = 4 << 20;

/// Makes sure that there are addresses for so many threads more.
///
/// Where a limit such as `ulimit -v` leaves room for a stack and for nothing else, the C library and the standard library end
/// the process: neither can say that a new thread has no memory for its own data. Asked in time, it is an error.
///
/// # Errors
/// `ENOMEM` when there is no room for them.
pub fn thread_room(threads: usize) -> io::Result<()> {
    room(threads.checked_mul(THREAD_BYTES).ok_or(io::ErrorKind::OutOfMemory)?)
}

/// Checks that the address space has so many bytes left. Small allocations that fail end the process, so whoever is about
/// to make many of them asks first.
///
/// # Errors
/// `ENOMEM` when there is no room for them.
pub fn room(bytes: usize) -> io::Result<()> {
    // Nothing is written there, so this costs no memory.
    Mapping::map(bytes, MapFlags::PRIVATE | MapFlags::NORESERVE).map(drop)
}
