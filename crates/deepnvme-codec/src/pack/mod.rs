//! Lossless compression of floats.
//!
//! ```text
//! element   = exponent (the symbol) + sign and mantissa (incompressible, stored unchanged)
//! layer 1   : a 2-bit code for each exponent: one of the three most frequent symbols, or an escape to the next layer
//! layer 2   : the same for the escaped exponents with the next three symbols, and so on
//! tail      : a byte for each exponent that the last layer escaped
//! ```
//!
//! The codes of 64 elements are two bit planes of 64 bits, so SIMD instructions decode 64 elements at once, without
//! parsing a bit stream. For weights the size is within one percent of a Huffman code.
//! `docs/reference/packed-format.md` specifies the format.
//!
//! A *block* is a run of elements that is decoded on its own, on any core, as soon as it arrives from the disk. A block
//! that would not shrink is stored raw, with a header of sixteen bytes.
//!
//! ```
//! use deepnvme_codec::{Float, pack};
//!
//! let weights: Vec<u8> = (0..1000u16).flat_map(|i| (0x3c00 + i % 300).to_le_bytes()).collect();
//! let mut packed = Vec::new();
//! pack::encode(Float::Bf16, &weights, &mut packed)?;
//!
//! let block = pack::PackedBlock::parse(&packed)?;
//! let mut decoded = vec![0; block.header().decoded_bytes()];
//! block.decode_into(&mut decoded)?;
//! assert_eq!(decoded, weights);
//! # Ok::<(), deepnvme_codec::Error>(())
//! ```

mod decode;
mod elements;
mod encode;
mod header;
mod simd;

pub use decode::{PackedBlock, Scratch};
pub use encode::encode;
pub use header::BlockHeader;

/// The default number of elements in a block: enough that headers do not matter, few enough that decoded elements
/// stay in the core's cache.
pub const BLOCK_ELEMENTS: usize = 1 << 16;
/// The maximum number of elements in a block. It bounds the memory that a corrupt header can request.
pub const BLOCK_ELEMENTS_MAX: usize = 1 << 20;
/// Bytes of a block's header.
pub const HEADER_BYTES: usize = 16;

/// The first bytes of a block: a name and the format version.
const MAGIC: [u8; 4] = *b"DNP\x01";
/// Bytes of a layer's header.
const LAYER_BYTES: usize = 8;
/// The maximum number of layers. Each has three symbols. A layer pays if it codes more than a quarter of its elements:
/// each takes two bits in the layer, and a byte in the tail. The last layers are for widely spread exponents.
const LAYERS_MAX: usize = 8;
/// Elements whose codes share a pair of words.
const GROUP: usize = 64;
/// Bytes of a group's two bit planes.
const PLANES_BYTES: usize = 2 * GROUP / 8;

/// Returns the maximum encoded size of `len` bytes of elements in one block.
#[must_use]
pub const fn encoded_bytes_max(len: usize) -> usize {
    len.saturating_add(HEADER_BYTES)
}
