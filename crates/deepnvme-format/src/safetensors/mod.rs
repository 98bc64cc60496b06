//! safetensors: eight bytes of length, a JSON header, the bytes of all tensors without gaps.
//!
//! Format: <https://github.com/huggingface/safetensors>, "Format". The header is padded with spaces, which readers
//! accept, so that the first tensor is aligned for direct I/O. `plan` lays a file out, `header` parses the header of a
//! file, `index` the index of several.

use serde::{Deserialize, Serialize};

use crate::dtype::Dtype;

mod header;
mod index;
mod plan;

pub use header::{Header, PACKED_KEY};
pub use index::Index;
pub use plan::{PADDING_BYTES_MIN, SafetensorsPlan, write_header_checksum};

/// The longest header that the format allows.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Bytes of the length field.
pub const LENGTH_BYTES: u64 = 8;
const METADATA: &str = "__metadata__";

/// A tensor to lay out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Vec<u64>,
}

/// A tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Vec<u64>,
    /// Offset in the file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry<D> {
    dtype: D,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Returns the bytes of a tensor, or `None` if torch cannot represent it. The sizes of an empty tensor count as well,
/// since strides are computed from them.
fn byte_count(shape: &[u64], dtype: Dtype) -> Option<u64> {
    let max = shape.iter().try_fold(dtype.bytes(), |product, size| product.checked_mul((*size).max(1)))?;
    (max <= i64::MAX.unsigned_abs()).then_some(if shape.contains(&0) { 0 } else { max })
}

#[cfg(test)]
mod tests;
