//! One seeded, deterministic simulation of disks, processes, crashes and faults, under the real code of the storage layer.
//!
//! Built with `--cfg simulated`, the crates of the workspace take their locks, threads and clocks from
//! `deepnvme-simulation-runtime`, and their files from a [`world`]. One seed draws a scenario, a world and a
//! schedule ([`run`]); the same seed gives the same execution, to the last step. Without that flag only the pure parts of
//! the model are compiled, and tested.
#![forbid(unsafe_code)]
#![allow(clippy::panic, reason = "a test tool reports what went wrong by panicking")]

#[cfg(simulated)]
pub mod backend;
#[cfg(simulated)]
pub mod run;
#[cfg(simulated)]
pub mod scenario;
#[cfg(simulated)]
pub mod scheduler;
pub mod world;
