//! A seeded, deterministic simulation of disks, processes, crashes and faults, for the real code of the storage layer.
//!
//! With `--cfg simulated`, the workspace's crates use locks, threads and clocks from `deepnvme-simulation-runtime`, and
//! files of a [`world`]. One seed draws a scenario, a world and a schedule (`run`). The same seed gives the same
//! execution, step by step. Without the flag, only the pure parts of the model are compiled and tested.
#![forbid(unsafe_code)]
#![allow(clippy::panic, reason = "a test tool reports what went wrong by panicking")]

#[cfg(simulated)]
pub mod device;
#[cfg(simulated)]
pub mod run;
#[cfg(simulated)]
pub mod scenario;
#[cfg(simulated)]
pub mod scheduler;
pub mod world;
