//! The fuzz targets, over their seeds and mutations of bytes.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

mod fuzz_bodies;

use std::ops::Range;

use deepnvme_testkit::fuzz_targets;
use fastrand::Rng;

/// Typical boundary values, and their neighbours.
const NUMBERS: [u64; 10] =
    [0, 1, 46, 0x7f, 0xff, 0xffff, 0x7fff_ffff, 0xffff_ffff, 0x7fff_ffff_ffff_ffff, 0xffff_ffff_ffff_ffff];

fn piece(bytes: &[u8], random: &mut Rng) -> Range<usize> {
    let (one, other) = (random.usize(..=bytes.len()), random.usize(..=bytes.len()));
    one.min(other)..one.max(other)
}

fn mutate(input: &mut Vec<u8>, seeds: &[Vec<u8>], random: &mut Rng) {
    let at = random.usize(..input.len().max(1));
    match random.u32(..8) {
        0 if !input.is_empty() => input[at] ^= 1 << random.u32(..8),
        1 if !input.is_empty() => input[at] = random.u8(..),
        2 => drop(input.drain(piece(input, random))),
        3 => input.truncate(at),
        4 => {
            let own = input[piece(input, random)].to_vec();
            drop(input.splice(at..at, own));
        }
        5 => {
            let other = &seeds[random.usize(..seeds.len())];
            let other = &other[piece(other, random)];
            let to = (at + other.len()).min(input.len());
            drop(input.splice(at..to, other.iter().copied()));
        }
        _ => {
            let number = NUMBERS[random.usize(..NUMBERS.len())].wrapping_add(random.u64(..3)).to_le_bytes();
            let width = 1 << random.u32(..4);
            let to = (at + width).min(input.len());
            drop(input.splice(at..to, number[..width].iter().copied()));
        }
    }
}

fuzz_targets! {
    mutate;
    archives: "archive", fuzz_bodies::archive;
    pickles: "pickle", fuzz_bodies::pickle;
    safetensors: "safetensors", fuzz_bodies::safetensors;
    indexes: "index_json", fuzz_bodies::index_json;
    sums: "sums", fuzz_bodies::sums;
}
