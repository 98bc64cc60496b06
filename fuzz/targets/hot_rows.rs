//! Fuzzes `hot_rows`; the checks are in `tests/fuzz_bodies` of its crate.
#![no_main]

#[path = "../../crates/deepnvme-rows/tests/fuzz_bodies/mod.rs"]
mod fuzz_bodies;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz_bodies::hot_rows(bytes));
