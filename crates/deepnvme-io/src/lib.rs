//! The deepnvme engine: moves any byte range between a file and any memory, at the speed of the device.
//!
//! The path of a request: `engine` plans it, and `split` divides its ranges into blocks. `request` has the queue from
//! which workers take the blocks, and the `Transfer` by which the caller waits. Each `worker` moves blocks through its
//! own `backend`, and handles their completions. `gpu` copies from and to GPUs.
//!
//! ```
//! use deepnvme_io::{Access, Config, DirectMode, Engine, OpenOptions, TensorFile, WriteOptions};
//! use deepnvme_mem::{Buffer, Region};
//!
//! # fn main() -> deepnvme_io::Result<()> {
//! # let folder = std::env::temp_dir();
//! # let path = folder.join(format!("deepnvme-doc-{}", std::process::id()));
//! let engine = Engine::new(Config::default())?;
//! let options = OpenOptions { access: Access::ReadWrite, create: true, direct: DirectMode::Preferred };
//! let file = TensorFile::open(&path, options)?;
//!
//! let (_, written) = engine.write(&file, 0, Region::from_vec(vec![7; 100_000]), WriteOptions::default())?.wait();
//! assert_eq!(written?.bytes, 100_000);
//!
//! let target = Buffer::zeroed(1000).expect("1000 bytes").into_region();
//! let (target, read) = engine.read(&file, 99_000, target)?.wait();
//! read?;
//! let bytes = target.and_then(|target| target.into_buffer().ok()).expect("the memory comes back");
//! assert_eq!(bytes.as_slice(), [7; 1000]);
//! # let _ = std::fs::remove_file(path);
//! # Ok(())
//! # }
//! ```
#![deny(unsafe_code)]

pub mod backend;
pub mod config;
pub mod display;
mod engine;
pub mod error;
mod file;
mod free_space;
pub mod fs;
pub mod gpu;
#[cfg(all(test, loom))]
mod loom_tests;
pub mod op;
pub mod probe;
mod request;
pub mod size;
pub mod split;
mod start;
mod stats;
mod stripe_layout;
mod sync;
pub mod trace;
mod worker;

/// Memory for requests: buffers, pools and regions.
pub use deepnvme_mem as mem;

pub use backend::gds::GpuRegistration;
pub use config::{BackendChoice, Config, DirectMode, WindowMode};
pub use deepnvme_cuda::exchange_capture_mode;
pub use engine::{BackendFactory, Engine, ReadItem, Refused, WriteItem};
pub use error::{Error, ErrorKind, Result, kernel_words};
pub use file::{Access, DirectState, OpenOptions, TensorFile};
pub use gpu::{
    GpuAccess, HostRegistration, StartedCopy, StreamEvents, current_gpu, register_waiting, register_with_driver,
    wait_for_copies,
};
pub use op::SubmitMode;
pub use request::{
    Durability, Oneshot, Progress, REQUESTS_MAX, Transfer, TransferMemory, Transferred, WriteMode, WriteOptions,
};
pub use start::start_thread;
pub use stats::{Comparisons, LatencySummary, StatsSnapshot};
pub use stripe_layout::StripeLayout;
pub use worker::{RETRIES_AT_ONCE, RETRIES_MAX, RETRY_PAUSE};
