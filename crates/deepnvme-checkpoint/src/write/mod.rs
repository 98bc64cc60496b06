//! Saving: writing a whole file in one pass, then renaming it.
//!
//! ```text
//! Save                       the file, planned to the last byte         (save, archive, safetensors)
//! spans, shares              how it is split                            (pure)
//! image, source, origin      assembles and hashes any piece of it
//! flips                      sign bits that torch flips lazily
//! writer                     threads that fill slots, and the engine that writes them
//! whole                      one writer writes all of it, under a private name
//! share, tally               one writer's part, and the checksums it sends to the others
//! placed                     a file whose tensors are placed by others, such as the kernel
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

/// Size of a piece: one request to the disk.
pub(crate) const PIECE_BYTES: u64 = if cfg!(simulated) { 16 << 10 } else { 1 << 20 };
