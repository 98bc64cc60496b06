//! What the tests of every crate share: the backend contract as functions, faults, a simulator, a model.
//!
//! - [`conformance`]: what every backend promises, as public functions that take a constructor.
//! - [`faults`]: a seeded decorator that makes any backend fail, stutter, dawdle and reorder.
//! - [`simulated`]: a backend whose schedule is a seed and whose power can be cut.
//! - [`model`]: a file as a plain vector, and random programs over it.
//! - [`data`]: random bytes, memory at chosen alignments, folders on a real disk.
//! - [`guard`]: one process with limits for thousands of hostile inputs.
//! - [`rng`], [`watchdog`]: the small tools under them.
//!
//! It is a dev-dependency: its functions assert, and a failed assertion names the seed.
#![forbid(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test tool reports what went wrong by panicking"
)]

pub mod conformance;
pub mod data;
pub mod faults;
pub mod guard;
pub mod model;
pub mod rng;
pub mod simulated;
pub mod watchdog;
