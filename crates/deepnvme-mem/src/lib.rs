//! Memory that outlives the I/O in flight on it: aligned buffers, page-locked pools, regions.
//!
//! This crate is one of the few places of `deepnvme` where `unsafe` code may live. Everything above it
//! moves bytes through the safe faces below and never sees a pointer.
//!
//! - [`Alignment`]: powers of two that cannot be anything else.
//! - [`Buffer`]: zeroed, page-aligned memory with one owner; [`Buffer::locked`] asks for page-locked
//!   memory, and [`LockState`] says what the kernel answered.
//! - [`Region`] and [`RegionMut`]: an address, a length, a [`Device`] and an [`Owner`] that keeps the
//!   memory alive. They never yield a reference to bytes, since the kernel, a GPU or Python may change
//!   them at any time.
//! - [`Strided`]: the row-major byte order of a tensor whose elements do not lie side by side.
//! - [`Reserved`]: a long range of addresses, few of whose pages have memory.
//! - [`Arena`]: one piece of memory that its owner cuts as it likes.
//! - [`Pool`] and [`Slot`]: one arena cut into equal slots that return themselves when dropped.
//! - [`prefetch()`]: memory that is wanted soon, asked for.
//! - [`dlpack`]: tensors handed over to, and taken from, other libraries without copying.
//!
//! # Model checking
//! The hand-over of slots between threads is checked over every interleaving by `loom`:
//! ```sh
//! RUSTFLAGS="--cfg loom" cargo test -p deepnvme-mem --release --lib loom_
//! ```
//! The unsafe code runs under miri (a component of the nightly toolchain) too; `lock.rs` is left out, since it asks the
//! kernel for what miri does not model:
//! ```sh
//! export MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-permissive-provenance" PROPTEST_CASES=4
//! cargo +nightly miri test -p deepnvme-mem --test dlpack --test pool --test region --test strided
//! ```

mod alignment;
mod arena;
mod buffer;
pub mod dlpack;

mod huge;
mod lock;
#[cfg(all(test, loom))]
mod loom_tests;
mod mapping;
mod numa;
mod odometer;
mod past_cache;
mod plane;
mod pool;
mod prefetch;
mod region;
mod region_mut;
mod reserve;
mod runs;
#[cfg(simulated)]
pub mod simulated;
mod span;
mod stream_handle;
mod strided;
mod sync;
mod thread_room;

pub use alignment::Alignment;
pub use arena::Arena;
pub use buffer::Buffer;
pub use lock::LockState;
pub use pool::{Pool, Slot};
pub use prefetch::prefetch;
pub use region::Region;
pub use region_mut::RegionMut;
pub use reserve::Reserved;
pub use span::{Device, Owner};
pub use stream_handle::StreamHandle;
pub use strided::{DIMS_MAX, Strided};
pub use thread_room::{room, thread_room};
