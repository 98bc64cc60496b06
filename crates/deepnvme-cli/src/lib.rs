//! The command `deepnvme`, as a library for the Rust binary and the Python package.
//!
//! [`commands`] runs what was typed: `arguments` says what may be typed, [`inspect`] finds what checkpoints hold, [`deepspeed`]
//! does what DeepSpeed's tools do, and [`show`] draws results. Measuring is `deepnvme-perf`'s.
#![forbid(unsafe_code)]

mod arguments;
pub mod commands;
pub mod deepspeed;
pub mod inspect;
pub mod show;

pub use deepnvme_perf::bench::Launcher;
pub use deepnvme_perf::{Error, Result};
