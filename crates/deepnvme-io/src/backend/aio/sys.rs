//! Linux native AIO as the kernel has it: five system calls and two structures. No library wraps them here.
#![allow(unsafe_code)]

use std::mem;
use std::os::fd::RawFd;
use std::ptr;

use crate::op::Errno;

/// What a control block asks for (`IOCB_CMD_*`).
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
pub(super) struct Event {
    /// What the control block carried.
    pub(super) data: u64,
    object: u64,
    /// Bytes moved, or a negative error number.
    pub(super) result: i64,
    result2: i64,
}

const _: () = assert!(mem::size_of::<ControlBlock>() == 64 && mem::size_of::<Event>() == 32);

impl ControlBlock {
    /// A transfer between `fd` at `offset` and `bytes` bytes (or that many iovecs) at `buffer`.
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

    /// A poll of `fd` for reading, once.
    pub(super) fn poll(fd: RawFd) -> Self {
        Self::new(Command::Poll, fd, libc::POLLIN as usize, 0, 0)
    }

    /// The same, carrying `data` to its event.
    pub(super) fn carrying(mut self, data: u64) -> Self {
        self.data = data;
        self
    }

    pub(super) fn data(&self) -> u64 {
        self.data
    }
}

/// A queue in the kernel; destroyed on drop, which waits for what is in flight.
#[derive(Debug)]
pub(super) struct Context(libc::c_ulong);

impl Context {
    /// `io_setup`: room for `events` ops in flight.
    pub(super) fn new(events: u32) -> Result<Self, Errno> {
        let mut id: libc::c_ulong = 0;
        // SAFETY: the kernel writes the new queue's number through a pointer that is valid for it.
        checked(unsafe { libc::syscall(libc::SYS_io_setup, events as libc::c_long, &raw mut id) })?;
        Ok(Self(id))
    }

    /// `io_submit`: how many of the blocks, from the first, the kernel took. An error is about the first.
    ///
    /// # Safety
    /// The memory that the blocks name, and the iovecs, stay valid until their events have been fetched.
    pub(super) unsafe fn submit(&self, blocks: &mut [*mut ControlBlock]) -> Result<usize, Errno> {
        // SAFETY: the array of pointers is valid for the call; the rest is promised by the caller.
        let taken =
            unsafe { libc::syscall(libc::SYS_io_submit, self.0, blocks.len() as libc::c_long, blocks.as_mut_ptr()) };
        checked(taken)
    }

    /// `io_getevents`: waits for `min` events, or until `timeout`, and fetches up to `events.len()`.
    pub(super) fn events(
        &self,
        min: usize,
        events: &mut [Event],
        timeout: Option<libc::timespec>,
    ) -> Result<usize, Errno> {
        let timeout = timeout.as_ref().map_or(ptr::null(), ptr::from_ref);
        // SAFETY: the kernel writes at most `events.len()` events; the timeout is null or outlives the call.
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

    /// `io_cancel`: withdraws a submitted block; its event still comes.
    pub(super) fn cancel(&self, block: &mut ControlBlock) -> Result<(), Errno> {
        let mut event = Event::default();
        // SAFETY: both structures are valid for the call; the kernel only reads the block to find its op.
        checked(unsafe { libc::syscall(libc::SYS_io_cancel, self.0, ptr::from_mut(block), &raw mut event) })?;
        Ok(())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the number names a queue that `new` made and nobody else destroys.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.0) };
    }
}

fn checked(result: libc::c_long) -> Result<usize, Errno> {
    usize::try_from(result).map_err(|_| Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
}
