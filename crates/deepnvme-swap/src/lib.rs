//! Tensors that do not fit into memory: they stay in swap files, and pass through bounded, page-locked memory.
//!
//! Whoever computes lends an item, which then lies in a slot of one arena for as long as it is held; what was changed is
//! written back behind it while the next ones are read. Optimizer states, gradients and parameters are three ways to use
//! this one engine.
//!
//! `residency` decides purely what is where and what is done next, with the help of `order` (when an item is needed next),
//! `places` (who can make room) and `extents` (where in the swap file it goes). `desk` is where items change hands, `waits`
//! knows when waiting would never end, `traffic` does what was decided. `files` makes the swap files and removes those of
//! crashed processes, `store` knows what is in them, `sums` whether it is still that. `swapper`, `lend`, `parts` and
//! `export` are the face.
//!
//! ```
//! use std::sync::Arc;
//!
//! use deepnvme_io::mem::Region;
//! use deepnvme_io::{Config, Engine};
//! use deepnvme_swap::{Options, Swapper};
//!
//! # let folder = tempfile::tempdir()?;
//! let engine = Arc::new(Engine::new(Config::default())?);
//! let swapper = Swapper::new(engine, &Options::new(folder.path(), 64 << 10))?;
//!
//! // Ten moments of 16 KiB, four of which are in memory at any time.
//! let names: Vec<String> = (0..10).map(|index| format!("moment.{index}")).collect();
//! for name in &names {
//!     swapper.put(name, &Region::from_vec(vec![0; 16 << 10]))?;
//! }
//! swapper.schedule(names.iter().map(String::as_str), true)?;
//! for step in 1..=3 {
//!     for name in &names {
//!         let moment = swapper.lend(name, true, &mut || false)?;
//!         let mut first = [0];
//!         moment.region().copy_to_slice(0, &mut first);
//!         moment.target().copy_from_slice(0, &[first[0] + 1]);
//!     }
//! }
//! let mut first = [0];
//! swapper.lend("moment.7", false, &mut || false)?.region().copy_to_slice(0, &mut first);
//! assert_eq!(first, [3]);
//! assert!(swapper.stats().resident_bytes_peak <= 64 << 10);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod borrowed;
mod checksums;
mod deadlock;
mod disk_space;
mod error;
mod export;
mod extent_allocator;
mod io_scheduler;
mod item_table;
#[cfg(all(test, loom))]
mod loom_tests;
mod next_use;
mod partial_io;
mod residency;
mod slot_allocator;
mod stats;
mod store;
mod swap_files;
mod swapper;
mod sync;

pub use borrowed::Lend;
pub use error::{Error, Result};
pub use export::Copied;
pub use stats::SwapStats;
pub use swap_files::{Located, NAME_PREFIX};
pub use swapper::{Look, Options, Swapper};
