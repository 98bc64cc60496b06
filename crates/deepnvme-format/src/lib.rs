//! Checkpoint file formats: layouts and parsers, without I/O.
//!
//! - [`archive`]: the ZIP files of uncompressed records that `torch.save` writes. [`archive::ArchivePlan`] lays an
//!   archive out before its first byte is written, [`archive::Directory`] parses one.
//! - [`safetensors`]: the same for safetensors files.
//! - [`pickle`]: the object graph of an archive, as data. Nothing is called.
//! - [`state`]: the tensors of such a graph, by name.
//! - [`file_list`]: the list of the files of a checkpoint, with the fingerprint of each.
//! - [`checksums`]: checksums that combine over any split, and the sidecar that stores them.
//! - [`Dtype`]: element types, with their names in torch and safetensors.
//! - [`Signs`]: torch's lazy negation and conjugation bits.
//!
//! Input is validated. Damage is an [`Error::Corrupt`], with the offset where one is known.
#![forbid(unsafe_code)]

pub mod archive;
pub mod checksums;
mod dtype;
mod error;
pub mod file_list;
mod json;
pub mod pickle;
pub mod safetensors;
mod signs;
pub mod state;

pub use dtype::Dtype;
pub use error::{Error, Result};
pub use signs::Signs;

/// Alignment of a large tensor: a multiple of every device's block, for direct I/O.
pub const ALIGNMENT_LARGE: u64 = 4096;
/// Alignment of a small tensor: torch's own, a cache line.
pub const ALIGNMENT_SMALL: u64 = 64;
/// From this size on a tensor is large: padding costs it less than 2%.
pub const LARGE_BYTES: u64 = if cfg!(simulated) { 4 << 10 } else { 256 << 10 };

/// The maximum number of dimensions, as in torch.
pub const DIMS_MAX: usize = 64;
/// The largest file layout: half of the kernel's limit, so that rounding up never overflows.
const FILE_BYTES_MAX: u64 = 1 << 62;
/// Bytes of memory for each byte of JSON: short names and numbers become strings and structures.
pub const JSON_MEMORY_FACTOR: usize = 24;

/// Returns the alignment of a tensor of `bytes`.
#[must_use]
pub fn alignment_of(bytes: u64) -> u64 {
    if bytes >= LARGE_BYTES { ALIGNMENT_LARGE } else { ALIGNMENT_SMALL }
}
