//! Checks over arbitrary bytes. One function for each kind of input: the targets in `fuzz/` call them with libFuzzer's
//! inputs, `tests/fuzz.rs` with the seeds and mutations of them.
//!
//! Each parses as a loader does, checks the result, writes it again, and parses that.
#![allow(dead_code, unused_imports, reason = "every target uses its own")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a panic is a finding")]

mod archive;
mod pickle;
mod tables;

pub(crate) use archive::archive;
pub(crate) use pickle::pickle;
pub(crate) use tables::{index_json, safetensors, sums};

/// Returns the bytes of a tensor in a type that does not overflow.
fn exact_bytes(shape: &[u64], width: u64) -> u128 {
    shape.iter().fold(width.into(), |product: u128, size| product.saturating_mul((*size).into()))
}

/// Checks the products that strides are computed from.
fn assert_countable(shape: &[u64], width: u64) {
    let sizes: Vec<u64> = shape.iter().map(|size| (*size).max(1)).collect();
    assert!(exact_bytes(&sizes, width) <= i64::MAX as u128, "{shape:?} of {width} bytes each");
}
