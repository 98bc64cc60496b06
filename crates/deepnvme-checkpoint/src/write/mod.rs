//! Saving: a whole file, in one pass, at once under its name.
//!
//! ```text
//! Save                       what the file is, to the last byte         (save, archive, safetensors)
//! spans, shares              how it is cut                              (pure)
//! image, source, origin      any piece of it, put together and hashed
//! flips                      signs that torch flips lazily
//! writer                     threads that fill slots, and the engine that writes them
//! whole                      all of it by one writer, under a private name
//! share, tally               one writer's part of it, and what it tells the others
//! placed                     a file whose tensors somebody else puts there
//! ```

mod archive;
mod flips;
mod image;
mod origin;
mod placed;
mod safetensors;
mod save;
mod share;
mod shares;
mod source;
mod spans;
mod tally;
mod whole;
mod writer;

pub use archive::Record;
pub(crate) use flips::Flips;
pub(crate) use origin::LastStorage;
pub use origin::{FileBytes, FileView, GpuBytes, Origin};
pub use placed::Placed;
pub use safetensors::Tensor;
pub use save::{Save, SaveOptions, Saved};
pub use share::Share;
pub use shares::{SHARE_BYTES_MIN, shares};
pub use whole::{create, named};
pub use writer::{POOL_BYTES_MAX, Staging};

/// Bytes of a piece: one request to the disk.
pub(crate) const PIECE_BYTES: u64 = if cfg!(simulated) { 16 << 10 } else { 1 << 20 };
