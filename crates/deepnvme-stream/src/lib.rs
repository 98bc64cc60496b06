//! Weights that do not fit into memory: they stay on disk, and pass through bounded memory unit by unit.
//!
//! A unit is what is used together, a layer as a rule. Whoever computes calls [`Streamer::acquire`] before a unit and
//! [`Streamer::release`] after it; meanwhile the next ones are fetched into slots of one arena, straight from the files that
//! they are in. [`Picker`] is for what is picked by index, such as the rows of an embedding or the experts of a layer.
//!
//! What arrives may become other bytes on the way ([`Arrival`]): cast, unpacked, dequantised by the threads of `crew`, and whoever waits.
//!
//! Where that is fewer bytes, part of it stays in memory as it is on disk (`stash`).
//!
//! `forecast` learns the order, `residency` decides purely what is where, `streamer` moves the bytes (`flight`: those of one unit), `source` knows when a
//! file is no longer the one that was opened.
//!
//! ```
//! use std::sync::Arc;
//!
//! use deepnvme_io::mem::{Buffer, RegionMut, StreamHandle};
//! use deepnvme_io::{Config, Engine};
//! use deepnvme_stream::{Piece, SlotClass, Source, Streamer, Unit};
//!
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("model.safetensors");
//! std::fs::write(&path, vec![7; 40_000])?;
//! let engine = Arc::new(Engine::new(Config::default())?);
//! let source = Source::open(&path)?;
//!
//! // Four layers of 10,000 bytes, two of which are in memory at any time.
//! let layer = |index: u64| Unit { class: 0, pieces: vec![Piece { source: 0, offset: index * 10_000, bytes: 10_000, at: 0 }], ..Unit::default() };
//! let class = SlotClass { slots: 2, ahead: 1, slot_bytes: 12_288, shares: false };
//! let arena = Buffer::zeroed(2 * 12_288)?.into_region();
//! let bytes = arena.region();
//! let streamer = Streamer::new(engine, vec![source], (0..4).map(layer).collect(), &[class], arena, 0)?;
//! for step in 0..3 {
//!     for unit in 0..4 {
//!         let at = streamer.acquire(unit, None)?.expect("no time limit was given");
//!         let mut byte = [0];
//!         bytes.copy_to_slice(at, &mut byte);
//!         assert_eq!(byte, [7], "compute with what is there");
//!         streamer.release(unit, StreamHandle::DEFAULT);
//!     }
//! }
//! assert!(streamer.stats().bytes_read <= 12 * 10_000);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod access_predictor;
mod compressed_cache;
mod decode;
mod decode_pool;
mod decode_task;
mod encoded_tensor;
mod error;
mod fetch;
mod inline_decoder;
mod layer_group;
pub mod pack;
mod residency;
mod slot_memory;
mod sparse_row_cache;
mod stats;
mod streamer;
mod sync;
mod weight_file;

pub use compressed_cache::stash_bytes_wanted;
pub use encoded_tensor::{Form, Stored};
pub use error::{Error, Result};
pub use layer_group::{Arrival, CONVERSION_BYTES_MAX, Conversion, Piece, SlotClass, Unit};
pub use sparse_row_cache::{Part, Picker, Places, Stretch};
pub use stats::StreamStats;
pub use streamer::Streamer;
pub use weight_file::Source;
