//! The file formats of checkpoints, as plans: what lies where, without a byte of I/O.
//!
//! - [`archive`]: what `torch.save` writes, a ZIP file of uncompressed records. [`archive::Plan`] lays one out before its
//!   first byte is written, [`archive::Directory`] reads one.
//! - [`safetensors`]: the same for safetensors files.
//! - [`pickle`]: the object graph of an archive, as data. Nothing in it is ever called.
//! - [`state`]: the tensors of such a graph, by name.
//! - [`set`]: the list of a checkpoint in several files, which tells each of them from any other.
//! - [`sums`]: checksums that can be computed in any cut, and the side-car that keeps them.
//! - [`Dtype`]: the element types, by the names that torch and safetensors have for them.
//!
//! Everything that comes out of a file is checked before it is believed; what is wrong is an [`Error`] with the place.
#![forbid(unsafe_code)]

pub mod archive;
mod dtype;
mod error;
mod json;
pub mod pickle;
pub mod safetensors;
pub mod set;
pub mod state;
pub mod sums;

pub use dtype::Dtype;
pub use error::{Error, Result};

/// Where direct I/O wants the bytes of a large tensor to begin: a multiple of every device's block.
pub const ALIGNMENT_LARGE: u64 = 4096;
/// Where the bytes of a small tensor begin: torch's own alignment, a cache line.
pub const ALIGNMENT_SMALL: u64 = 64;
/// From this size on a tensor is large: the padding costs it less than 2%.
pub const LARGE_BYTES: u64 = if cfg!(simulated) { 4 << 10 } else { 256 << 10 };

/// Most dimensions that a tensor may have: as many as torch's.
pub const DIMS_MAX: usize = 64;
/// The largest file that is laid out: half of what the kernel counts, so that rounding up never overflows.
const FILE_BYTES_MAX: u64 = 1 << 62;
/// What JSON takes in memory for each byte of it: short names and numbers become strings and structures.
const JSON_ROOM: usize = 24;

/// The alignment that bytes of that size get.
#[must_use]
pub fn alignment_of(bytes: u64) -> u64 {
    if bytes >= LARGE_BYTES { ALIGNMENT_LARGE } else { ALIGNMENT_SMALL }
}
