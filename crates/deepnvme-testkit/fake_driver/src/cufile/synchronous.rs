//! `cuFileRead` and `cuFileWrite`, the synchronous calls.
//!
//! They are ordered after everything that the host has observed, and nothing else: a queued copy on the same memory
//! is a race.

use crate::abi::Handle;
use crate::cufile::calls::behind_gate;
use crate::cufile::transfer::{Request, RequestedMemory};
use crate::state::cufile::transfer::Direction;
use crate::state::lock;

/// A call that reads.
// SAFETY: the name is the library's own, and nothing else in this one has it.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
extern "C" fn cuFileRead(handle: Handle, base: u64, bytes: usize, file_offset: i64, memory_offset: i64) -> isize {
    let memory = RequestedMemory { base, offset: memory_offset, bytes };
    move_now("cuFileRead", Request::new(Direction::Read, handle, file_offset, memory))
}

/// A call that writes.
// SAFETY: the name is the library's own, and nothing else in this one has it.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
extern "C" fn cuFileWrite(handle: Handle, base: u64, bytes: usize, file_offset: i64, memory_offset: i64) -> isize {
    let memory = RequestedMemory { base, offset: memory_offset, bytes };
    move_now("cuFileWrite", Request::new(Direction::Write, handle, file_offset, memory))
}

fn move_now(label: &'static str, request: Request) -> isize {
    let moved = behind_gate(label, |mut state| {
        let transfer = state.transfer(request)?;
        let point = state.begin_transfer(label, transfer.used);
        drop(state);
        let moved = transfer.run();
        lock().races.forget(point);
        moved
    });
    match moved {
        Ok(bytes) => bytes as isize,
        Err(code) => returned(code),
    }
}

/// As the header has it: an error of the system is -1 with `errno`, one of cuFile is its negative number.
fn returned(code: i32) -> isize {
    let code = code.abs();
    if code > 5000 {
        return -(code as isize);
    }
    // SAFETY: the C library says where this thread's `errno` is.
    unsafe { *libc::__errno_location() = code };
    -1
}
