//! Weights that exceed memory: they stay on disk, and layer groups stream through bounded memory.
//!
//! A layer group is used as a whole, usually one layer. Call [`Streamer::acquire`] before computing with a group and
//! [`Streamer::release`] after it; the next groups are fetched meanwhile, directly from the model's files into slots of
//! one arena. [`SparseRowCache`] is for tensors of which only some rows are used, such as embeddings and experts.
//!
//! Weights may be decoded on the way ([`Decoding`]): cast, unpacked or dequantised, by the threads of `decode_pool` and
//! by the waiting thread. `compressed_cache` keeps encoded weights in memory. `inline_decoder` decodes rows.
//!
//! `access_predictor` learns the order of groups, `residency` decides, without I/O, which groups are in memory,
//! `slot_memory` divides the arena, and `streamer` moves the bytes of groups (`fetch` reads one group).
//!
//! [`pack`] rewrites a model's files so that they stream faster.
//!
//! ```
//! use std::sync::Arc;
//!
//! use deepnvme_file::VersionedFile;
//! use deepnvme_io::mem::{Buffer, RegionMut, StreamHandle};
//! use deepnvme_io::{Config, Engine};
//! use deepnvme_stream::{LayerGroup, Piece, SlotClass, StreamPlan, Streamer};
//!
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("model.safetensors");
//! std::fs::write(&path, vec![7; 40_000])?;
//! let engine = Arc::new(Engine::new(Config::default())?);
//! let file = VersionedFile::open(&path)?;
//!
//! // Four layers of 10,000 bytes, two of which are in memory at any time.
//! let piece = |index: u64| Piece { source: 0, offset: index * 10_000, bytes: 10_000, at: 0 };
//! let layer = |index: u64| LayerGroup { class: 0, pieces: vec![piece(index)], ..LayerGroup::default() };
//! let class = SlotClass { slots: 2, prefetch: 1, slot_bytes: 12_288, shares_memory: false };
//! let arena = Buffer::zeroed(2 * 12_288)?.into_region();
//! let bytes = arena.region();
//! let groups = (0..4).map(layer).collect();
//! let plan = StreamPlan { files: vec![file], groups, classes: vec![class], ..StreamPlan::default() };
//! let streamer = Streamer::new(engine, plan, arena)?;
//! for step in 0..3 {
//!     for group in 0..4 {
//!         let at = streamer.acquire(group, None)?.expect("no time limit was given");
//!         let mut byte = [0];
//!         bytes.copy_to_slice(at, &mut byte);
//!         assert_eq!(byte, [7], "compute with what is there");
//!         streamer.release(group, StreamHandle::DEFAULT);
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
mod error;
mod fetch;
mod inline_decoder;
mod layer_group;
pub mod pack;
mod residency;
mod slot_memory;
mod sparse_row_cache;
mod stats;
mod stored_tensor;
mod streamer;
mod sync;

pub use compressed_cache::cacheable_bytes;
pub use error::{Error, Result};
pub use layer_group::{CONVERSION_BYTES_MAX, Conversion, Decoding, LayerGroup, Piece, SlotClass};
pub use sparse_row_cache::{RowLocations, RowTensor, SparseRowCache, StoredRange};
pub use stats::StreamStats;
pub use stored_tensor::{Form, StoredTensor};
pub use streamer::{StreamPlan, Streamer};
