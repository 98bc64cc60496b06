//! Rows of tables larger than memory, such as embeddings: reads a few rows at a time from where they are on disk, and
//! keeps rows that are used often in bounded memory.
//!
//! [`Table`] says where each row is, and [`RowStore`] reads rows. `read_plan` decides, without I/O, which pages to read,
//! and `cache` which rows stay. `fetch` is a batch of rows in flight, which all callers share that need one of them.
//! `staging` has the buffers of these reads, `row_writer` puts rows into the caller's memory, and `gpu_gather` into that
//! of a GPU. [`BackgroundStore`] adds gathers and prefetches in the background. [`pack()`] writes a table in `blocks`
//! with checksums, and its scales next to its rows.
#![forbid(unsafe_code)]

mod background;
mod blocks;
mod cache;
mod description;
mod error;
mod fetch;
mod gather;
mod gpu_gather;
mod host_gather;
mod hot_rows;
pub mod ids;
mod pack;
mod pinned_pieces;
mod read_plan;
mod room;
mod row_writer;
mod scales;
mod staging;
mod stats;
mod store;
mod sync;
mod table;
mod verify;

pub use background::{BackgroundStore, PendingGather};
pub use blocks::BlockLayout;
pub use cache::{Hold, S3Fifo, hash_row};
pub use description::{PACKED_VERSION, PackedDescription};
pub use error::{Error, Result};
pub use hot_rows::{HotRowList, HotRows};
pub use pack::{HOT_TENSOR, PACKED_KEY, PACKED_TENSOR, PackSource, pack};
pub use room::check_room;
pub use row_writer::{Conversion, Element};
pub use scales::{RowScales, ScaleType};
pub use stats::{Counters, RowStats};
pub use store::RowStore;
pub use table::{RowRange, Table};
