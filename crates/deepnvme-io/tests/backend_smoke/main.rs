//! Each real backend against a real file on disk: the first thing to look at when one of them breaks.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "helpers of tests fail like tests")]

mod lifetime;
mod queue;
mod support;
mod transfers;
