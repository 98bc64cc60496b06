//! The kernel interface of Linux native AIO: five system calls and two structures. No library here wraps them.
#![allow(unsafe_code)]

use std::mem;
use std::os::fd::RawFd;
use std::ptr;

use crate::op::Errno;

/// The command of a control block (`IOCB_CMD_*`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub(super) enum Command {
    Read = 0,
    Write = 1,
    SyncAll = 2,
    SyncData = 3,
    Poll = 5,
    ReadVectored = 7,
    WriteVectored = 8,
}

/// `struct iocb`: one submission.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct ControlBlock {
    data: u64,
    #[cfg(target_endian = "little")]
    key: u32,
    rw_flags: i32,
    #[cfg(target_endian = "big")]
    key: u32,
    command: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    result_fd: u32,
}

/// `struct io_event`: one completion.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct IoEvent {
    /// The data of the control block.
    pub(super) data: u64,
    object: u64,
    /// Bytes moved, or a negative error number.
    pub(super) result: i64,
    result2: i64,
}

const _: () = assert!(mem::size_of::<ControlBlock>() == 64 && mem::size_of::<IoEvent>() == 32);

impl ControlBlock {
    /// Creates a control block. A transfer is between `fd` at `offset` and `bytes` bytes (or that many iovecs) at
    /// `buffer`. A sync uses only `fd`.
    pub(super) fn new(command: Command, fd: RawFd, buffer: usize, bytes: usize, offset: u64) -> Self {
        Self {
            command: command as u16,
            fd: fd as u32,
            buffer: buffer as u64,
            bytes: bytes as u64,
            offset: offset as i64,
            ..Self::default()
        }
    }

    /// Creates a one-shot poll of `fd` for reading.
    pub(super) fn poll(fd: RawFd) -> Self {
        Self::new(Command::Poll, fd, libc::POLLIN as usize, 0, 0)
    }

    /// Sets the `data` that its event returns.
    pub(super) fn carrying(mut self, data: u64) -> Self {
        self.data = data;
        self
    }

    pub(super) fn data(&self) -> u64 {
        self.data
    }
}

/// A queue in the kernel. Dropping it destroys the queue, and waits for the ops in flight.
#[derive(Debug)]
pub(super) struct Context(libc::c_ulong);

impl Context {
    /// `io_setup`: creates a queue with room for `events` ops in flight.
    pub(super) fn new(events: u32) -> Result<Self, Errno> {
        let mut id: libc::c_ulong = 0;
        // SAFETY: the kernel writes the new queue's number through a pointer that is valid for it.
        checked(unsafe { libc::syscall(libc::SYS_io_setup, events as libc::c_long, &raw mut id) })?;
        Ok(Self(id))
    }

    /// `io_submit`: returns how many of the blocks, from the first, the kernel accepted. An error is about the first.
    ///
    /// # Safety
    /// Each pointer is to a valid block. The memory that the blocks refer to, and the iovecs, stay valid until the
    /// events of the blocks have been fetched.
    pub(super) unsafe fn submit(&self, blocks: &mut [*mut ControlBlock]) -> Result<usize, Errno> {
        // SAFETY: the array of pointers is valid for the call. The control blocks are valid, and their memory and
        // iovecs stay valid until their events, as the caller of `submit` ensures.
        let taken =
            unsafe { libc::syscall(libc::SYS_io_submit, self.0, blocks.len() as libc::c_long, blocks.as_mut_ptr()) };
        checked(taken)
    }

    /// `io_getevents`: waits for `min` events, at most for `timeout` (`None`: without a limit), and fetches up to
    /// `events.len()`. Returns their number.
    pub(super) fn events(
        &self,
        min: usize,
        events: &mut [IoEvent],
        timeout: Option<libc::timespec>,
    ) -> Result<usize, Errno> {
        let timeout = timeout.as_ref().map_or(ptr::null(), ptr::from_ref);
        // SAFETY: the kernel writes at most `events.len()` events. The timeout is null or outlives the call.
        let fetched = unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.0,
                min as libc::c_long,
                events.len() as libc::c_long,
                events.as_mut_ptr(),
                timeout,
            )
        };
        checked(fetched)
    }

    /// `io_cancel`: cancels a submitted block. Its event still arrives.
    pub(super) fn cancel(&self, block: &mut ControlBlock) -> Result<(), Errno> {
        let mut event = IoEvent::default();
        // SAFETY: both structures are valid for the call. The kernel finds the op by the block's address, and changes
        // no byte of the block.
        checked(unsafe { libc::syscall(libc::SYS_io_cancel, self.0, ptr::from_mut(block), &raw mut event) })?;
        Ok(())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the number refers to a queue that `new` created, and only this drop destroys it.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.0) };
    }
}

fn checked(result: libc::c_long) -> Result<usize, Errno> {
    usize::try_from(result).map_err(|_| Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
}
