//! Checkpoints: state dicts to and from torch archives and safetensors files, at the speed of the disk.
//!
//! Writing: `deepnvme_format` lays the file out; `write::spans` cuts it into pieces, purely; threads fill pooled slots with
//! what belongs there (`image`), hash it while it is in the cache, and have the engine write it directly (`writer`).
//! Headers that hold sums come last. The file is synced and gets its name at once, or nothing is left of it.
//!
//! Reading: `read::open` learns what a file holds; `read::arena` decides which stretches of it are mirrored in memory;
//! the engine fills those directly, and `read::verify` compares what came with the sums.
#![forbid(unsafe_code)]

mod crew;
mod error;
mod progress;
pub mod read;
mod stretch;
pub mod write;

pub use error::{Error, Result};
pub use progress::Progress;
