//! Runs each real backend on a real file on disk. Look here first if a backend fails.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "helpers of tests fail like tests")]

mod lifetime;
mod queue;
mod support;
mod transfers;
