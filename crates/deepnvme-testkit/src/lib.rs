//! Test helpers that all crates share: the backend contract, fault injection, a scheduled backend, a file model.
//!
//! - [`conformance`]: the backend contract, as public functions that take a constructor.
//! - [`faults`]: a seeded decorator that makes any backend fail, shorten, delay and reorder operations.
//! - [`forward_to_inner`]: the methods of a backend's wrapper that change nothing.
//! - [`model`]: a file as a vector, and random programs over it.
//! - [`data`]: random bytes, memory at chosen alignments, folders on a real disk.
//! - [`guard`]: a process with limits for thousands of malicious inputs.
//! - [`mod@fuzz_targets`], [`text_mutations`]: the bodies of fuzz targets over mutated seeds, and mutations of texts.
//! - [`scheduled_backend`]: a backend with a seeded schedule, over a disk whose power can be cut.
//! - [`sectors`]: writes that a power cut tears.
//! - [`rng`], [`watchdog`]: a random generator, and time limits.
//! - [`share`]: fewer cases where each takes much longer.
//! - [`skips`]: reports of tests that cannot run here.
//!
//! This crate is for tests and for the simulation: its functions assert, and a failed assertion names the seed.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test helpers fail by panicking")]

pub mod conformance;
pub mod data;
pub mod faults;
mod forward;
pub mod fuzz_targets;
pub mod guard;
pub mod model;
pub mod rng;
pub mod scheduled_backend;
pub mod sectors;
pub mod share;
pub mod skips;
pub mod text_mutations;
pub mod watchdog;
