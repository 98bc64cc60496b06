//! From Python objects to the engine's regions: the one folder of the binding with unsafe code.
//!
//! `torch` and `array` ask an object where its bytes lie, in plain attribute calls; here those answers become
//! addresses. Every region owns a Python reference that keeps its bytes alive and in place: of a tensor its storage, which
//! is not resized meanwhile (`resizable`), of a numpy array the array, of anything else an exported buffer or a DLPack
//! capsule. The engine may let go of that
//! reference on a thread of its own; PyO3 then keeps it until a thread that holds the GIL comes by, and no fork comes in
//! between (`forks`).
//!
//! `layout` is such an answer, and `region` asks for it; `buffer` has the buffer protocol and numpy's array struct, `capsule`
//! DLPack, `interpreter` what is asked of CPython itself, `lend` slices for kernels.

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
pub(crate) use layout::{LEGACY_STREAM, Layout, Place, Use, stream};
pub(crate) use lend::{Extent, Lent, check_apart};
pub(crate) use region::{source, storage, target, unowned};
pub(crate) use resizable::{_is_held, Keep};

/// The descriptor of that number, which the caller has promised to be open.
pub(crate) fn borrow_descriptor(number: i32) -> BorrowedFd<'static> {
    assert!(number >= 0, "a file descriptor is not negative");
    // SAFETY: the kernel checks the number at each use and answers EBADF where it is not open; the engine
    // duplicates it before it keeps anything.
    unsafe { BorrowedFd::borrow_raw(number) }
}
