//! DLPack tensors: export, import, and refusals.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod export;
mod foreign;
mod import;
