//! Any bytes as the input of `settings`; what must hold stands in the bodies.
#![no_main]

#[path = "../../crates/deepnvme-settings/tests/fuzz_bodies/mod.rs"]
mod fuzz_bodies;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz_bodies::settings(bytes));
