//! Encodes one op for `io_uring`: the kind of entry, its memory and its file.

use std::os::fd::AsRawFd;
use std::ptr;

use io_uring::opcode::{Fsync, Read, ReadFixed, Readv, Write, WriteFixed, Writev};
use io_uring::squeue::Entry;
use io_uring::types::{Fd, Fixed, FsyncFlags};

use super::buffers::BufferTable;
use super::files::FileRef;
use crate::backend::op_slots::OpMemory;
use crate::op::{Op, OpKind};

/// Encodes `op`, with its `memory`, and with its file as in `file_ref`.
pub(super) fn of(op: &Op, memory: OpMemory, file_ref: FileRef, buffers: &BufferTable) -> Entry {
    // `io_uring` has two types for the two kinds of file reference, and its trait over them is sealed.
    macro_rules! with_file {
        ($file:ident => $entry:expr) => {
            match file_ref.entry {
                Some(entry) if file_ref.registered => {
                    let $file = Fixed(u32::from(entry));
                    $entry
                }
                _ => {
                    let $file = Fd(op.file.as_raw_fd());
                    $entry
                }
            }
        };
    }
    let (addr, len) = match memory {
        OpMemory::None => (0, 0),
        OpMemory::Contiguous { addr, len } => (addr, len as u32),
        OpMemory::Vectored { iovecs, count } => (iovecs as usize, count as u32),
    };
    let is_vectored = matches!(memory, OpMemory::Vectored { .. });
    let fixed = if is_vectored { None } else { buffers.find(addr, len as usize) };
    let to = ptr::with_exposed_provenance_mut::<u8>(addr);
    let from = ptr::with_exposed_provenance::<u8>(addr);
    let iovecs = ptr::with_exposed_provenance::<libc::iovec>(addr);
    with_file!(file => match (op.kind, fixed) {
        (OpKind::Read, _) if is_vectored => Readv::new(file, iovecs, len).offset(op.offset).build(),
        (OpKind::Write, _) if is_vectored => Writev::new(file, iovecs, len).offset(op.offset).build(),
        (OpKind::Read, Some(entry)) => ReadFixed::new(file, to, len, entry).offset(op.offset).build(),
        (OpKind::Write, Some(entry)) => WriteFixed::new(file, from, len, entry).offset(op.offset).build(),
        (OpKind::Read, None) => Read::new(file, to, len).offset(op.offset).build(),
        (OpKind::Write, None) => Write::new(file, from, len).offset(op.offset).build(),
        (OpKind::SyncData, _) => Fsync::new(file).flags(FsyncFlags::DATASYNC).build(),
        (OpKind::SyncAll, _) => Fsync::new(file).build(),
    })
}
