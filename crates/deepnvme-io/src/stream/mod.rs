//! Files as streams over the engine: what `open(path, "wb")` and `open(path, "rb")` are made of.
//!
//! [`FileWriter`] overlaps the caller's copying with the writing, and replaces the file at once when it is
//! committed (`replace`; `set` is for several files and their index, `temporary` for names that prove what they are);
//! [`FileReader`] reads ahead while the caller reads on (`window`). Each holds [`BUFFERS`] buffers of
//! [`BUFFER_BYTES`] at the most.

mod folder;
mod reader;
mod replace;
mod set;
mod temporary;
mod window;
mod writer;

pub use folder::{PrivateFolder, remove_stale_folders};
pub use reader::FileReader;
pub use replace::{PART_MARK, Replacement, replace_small};
pub use set::{Member, Retired, SetReplacement, remove_whole_set, retire_set};
pub use temporary::{TEMPORARY_MARK, Temporary, remove_stale, resolve};
pub use writer::FileWriter;

/// Bytes of one buffer of a stream.
pub const BUFFER_BYTES: usize = if cfg!(simulated) { 16 << 10 } else { 4 << 20 };
/// Most buffers of a stream.
pub const BUFFERS: usize = 4;
