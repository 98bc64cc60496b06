//! Runs the fuzz bodies over their seeds and thousands of reproducible mutations of each.

mod fuzz_bodies;

use deepnvme_format::safetensors::LENGTH_BYTES;
use deepnvme_testkit::{fuzz_targets, text_mutations};

/// Mutates the JSON of a header, and states its new length.
fn mutate_header(input: &mut Vec<u8>, seeds: &[Vec<u8>], random: &mut fastrand::Rng) {
    let mut json = input.split_off(LENGTH_BYTES as usize);
    text_mutations::mutate(&mut json, seeds, random);
    input.copy_from_slice(&(json.len() as u64).to_le_bytes());
    input.extend(json);
}

fuzz_targets! {
    text_mutations::mutate;
    configurations: "config_json", fuzz_bodies::config_json;
}

fuzz_targets! {
    mutate_header;
    packed_headers: "container", fuzz_bodies::container;
}
