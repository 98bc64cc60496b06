//! Lossless packing of floats: fewer bytes, every bit the same.
//!
//! ```text
//! element   = exponent (symbol) + everything else (incompressible, stored as it is)
//! layer 1   : two bits for each exponent: the three most frequent ones, or "asks the next layer"
//! layer 2   : the same for those that asked, with the next three symbols, and so on
//! tail      : a byte for each exponent that no layer knew
//! ```
//!
//! The codes of a layer lie in two bit planes of 64 elements each, so that a processor with wide vectors decodes 64
//! elements by a handful of instructions, and no bit stream has to be followed. For weights that is within one percent of
//! the bytes of a Huffman code. `docs/packed-format.md` has the format to the byte.
//!
//! A run of elements is a *block*: decoded alone, on any core, as soon as it has come from the disk. What would not shrink
//! is stored as it is, sixteen bytes longer.
//!
//! ```
//! use deepnvme_codec::{Float, pack};
//!
//! let weights: Vec<u8> = (0..1000u16).flat_map(|i| (0x3c00 + i % 300).to_le_bytes()).collect();
//! let mut packed = Vec::new();
//! pack::encode(Float::Bf16, &weights, &mut packed)?;
//!
//! let block = pack::Block::parse(&packed)?;
//! let mut again = vec![0; block.header().decoded_bytes()];
//! block.decode_into(&mut again)?;
//! assert_eq!(again, weights);
//! # Ok::<(), deepnvme_codec::Error>(())
//! ```

mod decode;
mod elements;
mod encode;
mod header;
mod lanes;

pub use decode::{Block, Scratch};
pub use encode::encode;
pub use header::Header;

/// Elements of a block, if the caller has no reason for another number: large enough that headers do not matter, small
/// enough that what is decoded is still in the cache of the core that decoded it.
pub const BLOCK_ELEMENTS: usize = 1 << 16;
/// Most elements that a block may have, so that nobody reserves much memory for a damaged number.
pub const BLOCK_ELEMENTS_MAX: usize = 1 << 20;
/// Bytes of the header that every block begins with.
pub const HEADER_BYTES: usize = 16;

/// The first bytes of a block: a name, and the version of the format.
const MAGIC: [u8; 4] = *b"DNP\x01";
/// Bytes that describe one layer.
const LAYER_BYTES: usize = 8;
/// Most layers of a block. Each has three symbols, and a byte of the tail is cheaper than the fifth two bits; the rest is
/// for exponents that are spread widely.
const LAYERS_MAX: usize = 8;
/// Elements whose codes share a pair of words.
const GROUP: usize = 64;
/// Bytes of a group's two planes.
const PLANES_BYTES: usize = 2 * GROUP / 8;

/// The most bytes that `len` bytes of elements take as one block.
#[must_use]
pub const fn encoded_bytes_max(len: usize) -> usize {
    len.saturating_add(HEADER_BYTES)
}
