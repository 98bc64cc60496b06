//! Convert Python objects to the engine's regions: the only folder of the binding with unsafe code.
//!
//! `torch` and `array` locate an object's bytes with plain attribute calls; this folder turns the answers into
//! addresses. Every region owns a Python reference that keeps its bytes alive and in place. For a tensor that is its
//! storage, which is not resized meanwhile (`resizable`); for a numpy array the array; for anything else an exported
//! buffer or a DLPack capsule. The engine may drop this reference on its own thread. PyO3 then keeps it until a thread
//! holds the GIL, and no fork happens in between (`forks`).
//!
//! `layout` describes an object's bytes, and `region` requests it. `buffer` contains the buffer protocol and numpy's
//! array struct, `capsule` DLPack, `interpreter` calls to CPython, and `lend` slices for kernels.

use std::os::fd::BorrowedFd;

mod buffer;
mod capsule;
mod forks;
mod interpreter;
mod layout;
mod lend;
mod region;
mod resizable;

pub(crate) use buffer::{Exported, array_struct, is_buffer, new_bytes, with_bytes};
pub(crate) use capsule::{capsule, exchange_api, glance, has_name, take};
pub(crate) use forks::watch as watch_forks;
pub(crate) use interpreter::{Uncollected, call_soon};
pub(crate) use layout::{LEGACY_STREAM, Layout, Location, MemoryAccess, stream};
pub(crate) use lend::{Extent, Lent, check_apart};
pub(crate) use region::{source, storage, target, unowned};
pub(crate) use resizable::{_is_held, Keep};

/// Borrow the descriptor of this number, which the caller keeps open.
pub(crate) fn borrow_descriptor(number: i32) -> BorrowedFd<'static> {
    assert!(number >= 0, "a file descriptor is not negative");
    // SAFETY: the kernel checks the number at each use and returns EBADF if it is not open. The engine duplicates it
    // before keeping it.
    unsafe { BorrowedFd::borrow_raw(number) }
}
