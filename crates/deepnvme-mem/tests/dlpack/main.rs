//! Tensors that change hands: ours to others, others' to us, and those that must be refused.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod export;
mod foreign;
mod import;
