//! safetensors: eight bytes of length, a JSON header, the bytes of all tensors without a gap.
//!
//! Format: <https://github.com/huggingface/safetensors>, "Format". The header is padded with spaces, so that the first
//! tensor begins where direct I/O wants it; readers accept that. `plan` lays a file out, `header` reads what one says of
//! itself, `index` what is said of several.

use serde::{Deserialize, Serialize};

use crate::dtype::Dtype;

mod header;
mod index;
mod plan;

pub use header::Header;
pub use index::Index;
pub use plan::{PADDING_BYTES_MIN, Plan, seal};

/// The longest header that the format allows.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Bytes of the header's length.
pub const LENGTH_BYTES: u64 = 8;
const METADATA: &str = "__metadata__";

/// A tensor to be laid out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its sizes.
    pub shape: Vec<u64>,
}

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its sizes.
    pub shape: Vec<u64>,
    /// Where in the file its bytes begin.
    pub offset: u64,
    /// How many those are.
    pub bytes: u64,
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry<D> {
    dtype: D,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Bytes of a tensor; `None` for what torch cannot count. Sizes of a tensor without elements count, too, since those who
/// make strides multiply them.
fn byte_count(shape: &[u64], dtype: Dtype) -> Option<u64> {
    let most = shape.iter().try_fold(dtype.bytes(), |product, size| product.checked_mul((*size).max(1)))?;
    (most <= i64::MAX.unsigned_abs()).then_some(if shape.contains(&0) { 0 } else { most })
}

#[cfg(test)]
mod tests;
