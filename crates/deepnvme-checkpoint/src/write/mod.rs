//! Saves: a whole file, written in one pass and then renamed.
//!
//! ```text
//! Save                                     the file, planned to the last byte    (save, archive, safetensors)
//! spans, shard_ranges                      how it is split                       (pure)
//! file_layout, hashed_record, data_source  assembles and hashes any piece of it
//! sign_flips                               sign bits that torch flips lazily
//! write_pipeline                           threads that fill slots, and the engine that writes them
//! whole                                    all of it from one writer, under a private name
//! shard, checksum_exchange                 one writer's part, and the checksums it sends to the others
//! reflink_target                           a file whose tensors others write, such as the kernel
//! ```

mod archive;
mod checksum_exchange;
mod data_source;
mod file_layout;
mod hashed_record;
mod reflink_target;
mod safetensors;
mod save;
mod shard;
mod shard_ranges;
mod sign_flips;
mod spans;
mod whole;
mod write_pipeline;

pub use archive::Record;
pub use data_source::DataSource;
pub(crate) use data_source::{FileBytes, FileView, Place, StorageCache};
pub use reflink_target::ReflinkTarget;
pub use safetensors::Tensor;
pub use save::{Save, SaveOptions, Saved};
pub use shard::Shard;
pub use shard_ranges::{SHARD_BYTES_MIN, shard_ranges};
pub use whole::{create, error_of_target};
pub use write_pipeline::{POOL_BYTES_MAX, Staging};

/// Size of a piece: one request to the disk.
pub(crate) const PIECE_BYTES: u64 = if cfg!(simulated) { 16 << 10 } else { 1 << 20 };
/// Bytes copied and then hashed at a time, small enough for the cache of one core.
pub(crate) const STEP_BYTES: u64 = 128 << 10;
