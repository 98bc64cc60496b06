//! Runs the body of the fuzz target over its seeds, and over thousands of deterministic mutations.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

mod fuzz_bodies;

use std::fs;
use std::path::Path;

const MUTATIONS: usize = 20_000;
/// Valid and invalid field values.
const PIECES: [&str; 16] = [
    "0",
    "1",
    "-1",
    "2.5",
    "600",
    "1200",
    "18446744073709551615",
    "\\\"int8\\\"",
    "\\\"lossless\\\"",
    "\\\"F32\\\"",
    "\"U8\"",
    "null",
    "[]",
    "{}",
    ",",
    ":",
];

/// Replaces a whole field, or the text between two.
fn mutate(json: &mut Vec<u8>, random: &mut fastrand::Rng) {
    let is_edge = |byte: &u8| b"[]{},: ".contains(byte);
    let edges: Vec<usize> = (0..json.len()).filter(|at| is_edge(&json[*at])).collect();
    if edges.is_empty() {
        return;
    }
    let at = edges[random.usize(..edges.len())] + 1;
    let end = (at..json.len()).find(|end| is_edge(&json[*end])).unwrap_or(json.len());
    let piece = PIECES[random.usize(..PIECES.len())].as_bytes();
    match random.u32(..5) {
        0 | 1 => drop(json.splice(at..end, piece.iter().copied())),
        2 => drop(json.drain(at..end)),
        3 => {
            let twice = json[at..end].repeat(2);
            drop(json.splice(at..end, twice));
        }
        _ => json[at - 1] ^= 1 << random.u32(..8),
    }
}

#[test]
fn configurations() {
    deepnvme_testkit::text_mutations::check("config_json", fuzz_bodies::config_json);
}

#[test]
fn packed_headers() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/container");
    let mut paths: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let seeds: Vec<Vec<u8>> = paths.iter().map(|path| fs::read(path).unwrap()).collect();
    assert!(!seeds.is_empty());
    seeds.iter().for_each(|seed| fuzz_bodies::container(seed));
    let mut random = fastrand::Rng::with_seed(9);
    for round in 0..MUTATIONS {
        let mut json = seeds[round % seeds.len()][8..].to_vec();
        for _ in 0..=random.usize(..3) {
            mutate(&mut json, &mut random);
        }
        let mut file = (json.len() as u64).to_le_bytes().to_vec();
        file.extend(json);
        fuzz_bodies::container(&file);
    }
}
