//! The command `deepnvme`, as a library for the Rust binary and the Python package.
//!
//! `arguments` defines the command line, [`commands`] runs it, [`inspect`] examines checkpoints, [`deepspeed`] replaces
//! DeepSpeed's tools, and [`show`] draws results. `deepnvme-perf` measures.
#![forbid(unsafe_code)]

mod arguments;
pub mod commands;
pub mod deepspeed;
pub mod inspect;
pub mod show;

pub use deepnvme_perf::bench::Launcher;
pub use deepnvme_perf::{Error, Result};
