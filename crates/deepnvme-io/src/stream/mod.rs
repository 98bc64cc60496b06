//! Files as streams over the engine: what `open(path, "wb")` and `open(path, "rb")` are made of.
//!
//! [`FileWriter`] overlaps the caller's copying with the writing, and replaces the file at once when it is
//! committed; [`FileReader`] reads ahead while the caller reads on (`window`). Each holds [`BUFFERS`] buffers of
//! [`BUFFER_BYTES`] at the most.

mod reader;
mod replace;
mod temporary;
mod window;
mod writer;

pub use reader::FileReader;
pub use replace::{PART_MARK, Replacement, TEMPORARY_MARK};
pub use writer::FileWriter;

/// Bytes of one buffer of a stream.
pub const BUFFER_BYTES: usize = 4 << 20;
/// Most buffers of a stream.
pub const BUFFERS: usize = 4;
