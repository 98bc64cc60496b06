//! `ds_io` and `ds_nvme_tune` with DeepSpeed's options, output lines and log files, on our engine.
//!
//! Bugs of DeepSpeed's own tools are not copied: booleans of the JSON block are booleans, its key is the one that a
//! configuration reads, usage errors end with status 2, and files are removed at the end.

pub mod io;
pub mod tune;

/// DeepSpeed's GB.
const GIB: f64 = (1_u64 << 30) as f64;
