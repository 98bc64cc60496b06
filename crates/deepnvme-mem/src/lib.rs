//! Memory that outlives the I/O in flight on it: aligned buffers, pinned pools, regions.
//!
//! This crate is one of the few places in `deepnvme` with `unsafe` code. The crates above copy the bytes of host memory
//! through its safe interface.
//!
//! - [`Alignment`] and [`PAGE_BYTES`]: powers of two, checked by their type.
//! - [`Buffer`]: zeroed, page-aligned memory with one owner. [`Buffer::locked`] requests pinned memory, and
//!   [`LockState`] is the outcome.
//! - [`Region`] and [`RegionMut`]: an address, a length, a [`Device`] and an [`Owner`] that keeps the memory alive.
//!   They never return a reference to bytes, since the kernel, a GPU or Python may change them at any time.
//! - [`RegistrableRange`]: memory to register, without access to its bytes.
//! - [`Strided`]: the layout of a strided tensor. [`Rows`] are the pieces of memory that it leads to.
//! - [`ReservedRange`]: a reserved address range, of which only the written pages have memory.
//! - [`Arena`]: one piece of memory that its owner divides freely.
//! - [`Pool`] and [`Slot`]: an arena divided into equal slots that return themselves when dropped.
//! - [`prefetch()`]: a prefetch of one cache line.
//! - [`first_shared()`]: finds tensors ([`TensorPlace`]) that share bytes.
//! - [`check_memory()`], [`check_thread_memory()`] and [`exceeds_available()`]: whether there is room for more.
//! - [`dlpack`]: tensors exchanged with other libraries without copies.
//! - [`CreatorProcess`], [`ParentOnly`] and [`process_id()`]: detect that a value was inherited by a fork.
//! - [`sync`]: locks that ignore poison.
//!
//! # Model checking
//! `loom` checks slots passed between threads over every interleaving:
//! ```sh
//! RUSTFLAGS="--cfg loom" cargo test -p deepnvme-mem --release --lib loom_
//! ```
//! miri (a component of the nightly toolchain) checks the unsafe code, except for system calls that it lacks, as those
//! of `lock.rs`, `numa.rs` and `huge.rs`:
//! ```sh
//! export MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-permissive-provenance" PROPTEST_CASES=4
//! cargo +nightly miri test -p deepnvme-mem --test dlpack --test pool --test region --test strided
//! ```

mod alignment;
mod arena;
mod buffer;
mod copy_2d;
mod device;
pub mod dlpack;
mod fork;
mod huge;
mod lock;
#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(simulated)]
pub mod mapped_bytes;
mod mapping;
mod multi_index;
mod non_temporal;
mod numa;
mod pool;
mod prefetch;
mod raw_memory;
mod region;
mod region_mut;
mod registrable_range;
mod reserved_range;
mod rows;
mod runs;
mod shared_bytes;
mod strided;
pub mod sync;

pub use alignment::{Alignment, PAGE_BYTES};
pub use arena::Arena;
pub use buffer::Buffer;
pub use device::{Device, StreamHandle};
pub use fork::{CreatorProcess, ParentOnly, process_id};
pub use lock::{LockState, exceeds_available};
pub use mapping::{check_memory, check_thread_memory};
pub use pool::{Pool, Slot};
pub use prefetch::prefetch;
pub use raw_memory::Owner;
pub use region::Region;
pub use region_mut::RegionMut;
pub use registrable_range::RegistrableRange;
pub use reserved_range::{ReservedRange, sees_used_pages};
pub use rows::Rows;
pub use shared_bytes::{TensorPlace, first_shared};
pub use strided::{DIMS_MAX, Strided};
