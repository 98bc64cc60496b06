//! Files by name, on top of the engine of `deepnvme-io`.
//!
//! - `open` resolves a path to a file or a stripe set, and opens it for the engine.
//! - `stripe_set` is one logical file over several disks, with its manifest.
//! - `replace` replaces a file, a set of files or a folder atomically, and cleans up after killed processes.
//! - `aligned_range` reads byte ranges into buffers without a copy.
//! - `reader` and `writer` are file streams. `prefetch_window` is one buffer of a reader. Python's `open(path, "rb")`
//!   and `open(path, "wb")` are built on them.
//!
//! ```
//! use deepnvme_file::{FileReader, FileWriter, Target};
//! use deepnvme_io::{Config, Durability, Engine};
//! use std::sync::Arc;
//!
//! # fn main() -> deepnvme_io::Result<()> {
//! # let path = std::env::temp_dir().join(format!("deepnvme-file-doc-{}", std::process::id()));
//! let engine = Arc::new(Engine::new(Config::default())?);
//! let target = Target::from(&path);
//!
//! let mut writer = FileWriter::create(Arc::clone(&engine), &target, Durability::None)?;
//! writer.write(&[7; 100_000])?;
//! writer.commit()?; // the name refers to the new file from here on
//!
//! let mut bytes = [0; 1000];
//! assert_eq!(FileReader::open(engine, &target)?.read_at(99_000, &mut bytes)?, 1000);
//! assert_eq!(bytes, [7; 1000]);
//! # let _ = std::fs::remove_file(path);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

pub mod aligned_range;
mod open;
mod prefetch_window;
mod reader;
pub mod replace;
pub mod stripe_set;
mod sync;
mod versioned_file;
mod writer;

pub use open::{Target, from_descriptors, is_url, open};
pub use reader::FileReader;
pub use replace::{Replacement, Temporary};
pub use stripe_set::StripeSet;
pub use versioned_file::{FileChange, VersionedFile};
pub use writer::FileWriter;

/// Size of one buffer of a writer.
pub const BUFFER_BYTES: usize = if cfg!(simulated) { 16 << 10 } else { 4 << 20 };
/// Maximum number of buffers of a writer. The windows of a reader have as much memory together.
pub const BUFFERS: usize = 4;
