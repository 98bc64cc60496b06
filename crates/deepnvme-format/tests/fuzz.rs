//! Runs the fuzz targets over their seeds and some thousand mutations of each. Deterministic, and without a nightly
//! toolchain.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

mod fuzz_bodies;

use std::fs;
use std::path::Path;

/// Mutations per target, over all its seeds.
const MUTATIONS: usize = 20_000;
/// Typical boundary values, and their neighbours.
const NUMBERS: [u64; 10] =
    [0, 1, 46, 0x7f, 0xff, 0xffff, 0x7fff_ffff, 0xffff_ffff, 0x7fff_ffff_ffff_ffff, 0xffff_ffff_ffff_ffff];
const BYTES_MAX: usize = 64 << 10;

fn seeds(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds").join(target);
    let mut paths: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(!paths.is_empty(), "{} is empty", folder.display());
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

/// A random generator (splitmix64).
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.roll() % limit.max(1) as u64) as usize
    }

    fn range(&mut self, length: usize) -> std::ops::Range<usize> {
        let (one, other) = (self.below(length + 1), self.below(length + 1));
        one.min(other)..one.max(other)
    }
}

fn mutate(input: &mut Vec<u8>, others: &[Vec<u8>], dice: &mut Dice) {
    let at = dice.below(input.len());
    match dice.below(8) {
        0 if !input.is_empty() => input[at] ^= 1 << dice.below(8),
        1 if !input.is_empty() => input[at] = dice.roll() as u8,
        2 => drop(input.drain(dice.range(input.len()))),
        3 => input.truncate(at),
        4 => {
            let piece = input[dice.range(input.len())].to_vec();
            drop(input.splice(at..at, piece));
        }
        5 => {
            let other = &others[dice.below(others.len())];
            let piece = other[dice.range(other.len())].to_vec();
            let to = (at + piece.len()).min(input.len());
            drop(input.splice(at..to, piece));
        }
        _ => {
            let number = NUMBERS[dice.below(NUMBERS.len())].wrapping_add(dice.below(3) as u64).to_le_bytes();
            let width = 1 << dice.below(4);
            let to = (at + width).min(input.len());
            drop(input.splice(at..to, number[..width].iter().copied()));
        }
    }
    input.truncate(BYTES_MAX);
}

#[track_caller]
fn smoke(target: &str, body: fn(&[u8])) {
    let seeds = seeds(target);
    seeds.iter().for_each(|seed| body(seed));
    let mut dice = Dice(target.len() as u64);
    for round in 0..MUTATIONS {
        let mut input = seeds[round % seeds.len()].clone();
        for _ in 0..=dice.below(4) {
            mutate(&mut input, &seeds, &mut dice);
        }
        body(&input);
    }
}

#[test]
fn archives() {
    smoke("archive", fuzz_bodies::archive);
}

#[test]
fn pickles() {
    smoke("pickle", fuzz_bodies::pickle);
}

#[test]
fn safetensors() {
    smoke("safetensors", fuzz_bodies::safetensors);
}

#[test]
fn indexes() {
    smoke("index_json", fuzz_bodies::index_json);
}

#[test]
fn sums() {
    smoke("sums", fuzz_bodies::sums);
}
