//! Encodes one op for native AIO, and explains a refusal of the queue itself.

use std::os::fd::AsRawFd;

use super::sys::{Command, ControlBlock};
use crate::backend::op_slots::OpMemory;
use crate::error::Error;
use crate::op::{Errno, Op, OpKind};

/// Encodes `op`, whose memory is `memory`, for the kernel.
pub(super) fn block_of(op: &Op, memory: OpMemory) -> ControlBlock {
    let fd = op.file.as_raw_fd();
    let (addr, len, is_vectored) = match memory {
        OpMemory::None => (0, 0, false),
        OpMemory::Contiguous { addr, len } => (addr, len, false),
        OpMemory::Vectored { iovecs, count } => (iovecs as usize, count, true),
    };
    let command = match (op.kind, is_vectored) {
        (OpKind::Read, false) => Command::Read,
        (OpKind::Read, true) => Command::ReadVectored,
        (OpKind::Write, false) => Command::Write,
        (OpKind::Write, true) => Command::WriteVectored,
        (OpKind::SyncData, _) => return ControlBlock::new(Command::SyncData, fd, 0, 0, 0),
        (OpKind::SyncAll, _) => return ControlBlock::new(Command::SyncAll, fd, 0, 0, 0),
    };
    ControlBlock::new(command, fd, addr, len, op.offset)
}

/// Runs a sync on this thread. Returns `None` if the op is not a sync.
pub(super) fn sync_inline(op: &Op) -> Option<Result<(), Errno>> {
    match op.kind {
        OpKind::SyncData => Some(rustix::fs::fdatasync(&op.file)),
        OpKind::SyncAll => Some(rustix::fs::fsync(&op.file)),
        OpKind::Read | OpKind::Write => None,
    }
}

/// Explains a refusal of `io_setup`.
pub(super) fn set_up_error(errno: Errno, depth: u32) -> Error {
    let error = Error::os("io_setup", errno);
    if errno != Errno::AGAIN {
        return error;
    }
    let read = |path: &str| std::fs::read_to_string(path).map_or("unknown".into(), |text| text.trim().to_owned());
    let (used, max) = (read("/proc/sys/fs/aio-nr"), read("/proc/sys/fs/aio-max-nr"));
    error.because(format!(
        "the system's AIO ops are used up: {used} of {max} are in use, and {depth} more do not fit; raise the \
         limit (`sysctl -w fs.aio-max-nr=1048576`, file /proc/sys/fs/aio-max-nr) or lower queue_depth or workers"
    ))
}
