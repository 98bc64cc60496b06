//! Saves that calls, kills and power cuts interrupt, at every point. The next save cleans up and loses nothing.
//!
//! `setup` has the world and the work, for sets and for checkpoints.
#![cfg(simulated)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "these are tests")]

mod failing_calls;
mod foreign_files;
mod power_cuts;
mod setup;
