//! Convert Python objects to the engine's regions: the only folder of the binding with unsafe code.
//!
//! `torch` and `array` locate an object's bytes with plain attribute calls; this folder turns the answers into
//! addresses. `tensor_memory` asks each protocol in turn. Every region owns a Python reference that keeps its bytes
//! alive and in place, except those of `into_unowned`. For a tensor that is its storage, which is not resized meanwhile
//! (`held_storages`, `resize_flag`); for a numpy array the array; for anything else an exported buffer or a DLPack
//! tensor. The engine may drop this reference on its own thread. PyO3 then puts it into a list, for the next thread
//! that holds the GIL. No fork happens while that list is locked (`forks`).
//!
//! `layout` describes an object's bytes, and `region` makes regions of it. `buffer` contains the buffer protocol and
//! numpy's array struct, `capsule` DLPack, `interpreter` calls to CPython, `tensor_slice` slices for kernels, and
//! `described` what one C call tells about a torch tensor.

use std::os::fd::BorrowedFd;

mod buffer;
mod capsule;
mod described;
mod forks;
mod held_storages;
mod interpreter;
mod layout;
mod region;
mod resize_flag;
mod tensor_slice;

pub(crate) use buffer::{Exported, array_struct, exported, is_buffer, new_bytes, with_bytes};
pub(crate) use capsule::{capsule, has_name, take};
pub(crate) use described::{Described, PlainClasses, PlainTensor};
pub(crate) use forks::watch as watch_forks;
pub(crate) use held_storages::{_is_held, KeepAlive, StorageHolds};
pub(crate) use interpreter::{GcPause, call_soon, end_gc_pauses};
pub(crate) use layout::{DeviceStream, LEGACY_STREAM, Layout, MemoryAccess, raw_stream, stream};
pub(crate) use region::{ObjectMemory, held_region, storage_regions};

pub(crate) use tensor_slice::{AddressRange, Plain, TensorSlice, check_disjoint, check_disjoint_from};

/// Borrows the descriptor of this number, which the caller keeps open.
pub(crate) fn borrow_descriptor(number: i32) -> BorrowedFd<'static> {
    assert!(number >= 0, "a file descriptor is not negative");
    // SAFETY: the kernel checks the number at each use and returns EBADF if it is not open. The engine duplicates it
    // before keeping it.
    unsafe { BorrowedFd::borrow_raw(number) }
}
