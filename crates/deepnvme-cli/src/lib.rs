//! The command `deepnvme`, as a library for the Rust binary and the Python package.
//!
//! `arguments` defines the command line, [`commands`] runs it, [`inspect`] examines checkpoints, [`deepspeed`] replaces
//! DeepSpeed's tools, [`show`] draws results, and `standard_streams` prepares the process. `deepnvme-perf` measures.
#![forbid(unsafe_code)]

mod arguments;
pub mod commands;
pub mod deepspeed;
pub mod inspect;
pub mod show;
mod standard_streams;

pub use deepnvme_perf::bench::Launcher;
pub use deepnvme_perf::{Error, Result};
pub use standard_streams::{CheckedStdout, reserve_standard_streams};
