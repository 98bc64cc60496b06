//! Tensors that exceed memory: they are stored in swap files and borrowed in bounded, pinned memory.
//!
//! A borrowed item lies in a slot of one arena while it is held. Changed items are written back while the next ones are
//! read. Optimizer states, gradients and parameters all use this engine.
//!
//! Pure decisions: `residency` decides which items are in memory and which I/O comes next, with `next_use` (when an
//! item is used next), `slot_allocator` (where in memory, with a `gap_index`), `extent_allocator` (where on disk) and
//! `deadlock` (whether a wait can end). `id_map` is a fast map by item.
//!
//! I/O: `item_table` is where threads borrow and wait, and `io_scheduler` does the planned I/O, which ends in
//! `completions`. `store` knows the place of each item on disk, `disk_space` allocates and resizes, `swap_files`
//! creates and deletes files, `checksums` detects damage, `stop_check` ends a caller's transfers.
//!
//! API: `swapper` with its `options` and `stats`, `borrowed`, `partial_io` and `export`, all made of `item_access`.
//! ```
//! use std::sync::Arc;
//!
//! use deepnvme_io::mem::Region;
//! use deepnvme_io::{Config, Engine};
//! use deepnvme_swap::{SwapperOptions, Swapper};
//!
//! # let folder = tempfile::tempdir()?;
//! let engine = Arc::new(Engine::new(Config::default())?);
//! let swapper = Swapper::new(engine, &SwapperOptions::new(folder.path(), 64 << 10))?;
//!
//! // Ten moments of 16 KiB, four of which are in memory at any time.
//! let names: Vec<String> = (0..10).map(|index| format!("moment.{index}")).collect();
//! for name in &names {
//!     swapper.put(name, &Region::from_vec(vec![0; 16 << 10]))?;
//! }
//! swapper.schedule(names.iter().map(String::as_str), true)?;
//! for step in 1..=3 {
//!     for name in &names {
//!         let moment = swapper.borrow(name, true, &mut || false)?;
//!         let mut first = [0];
//!         moment.region().copy_to_slice(0, &mut first);
//!         moment.target().copy_from_slice(0, &[first[0] + 1]);
//!     }
//! }
//! let mut first = [0];
//! swapper.borrow("moment.7", false, &mut || false)?.region().copy_to_slice(0, &mut first);
//! assert_eq!(first, [3]);
//! assert!(swapper.stats().resident_bytes_peak <= 64 << 10);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod borrowed;
mod checksums;
mod completions;
mod deadlock;
mod disk_space;
mod error;
mod export;
mod extent_allocator;
mod gap_index;
mod id_map;
mod io_scheduler;
mod item_access;
mod item_table;
#[cfg(all(test, loom))]
mod loom_tests;
mod next_use;
mod options;
mod partial_io;
mod residency;
mod slot_allocator;
mod stats;
mod stop_check;
mod store;
mod swap_files;
mod swapper;
mod sync;

pub use borrowed::Borrowed;
pub use error::{Error, Result};
pub use export::{CopyStats, FileRange};
pub use options::{AttachedRange, CancelCheck, SwapperOptions};
pub use stats::SwapStats;
pub use swap_files::{FileExtent, NAME_PREFIX};
pub use swapper::Swapper;
