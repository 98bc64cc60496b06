//! Reproducible mutations of JSON and TOML texts, for the bodies of fuzz targets.

use crate::fuzz_targets;

/// Mutations for a body that works on files.
const FILE_MUTATIONS: usize = 5000;
/// Valid and invalid field contents.
const PIECES: [&str; 20] = [
    "0",
    "1",
    "-1",
    "4096",
    "1048576",
    "18446744073709551615",
    "1e400",
    "\"\"",
    "\"a\"",
    "\"../..\"",
    "null",
    "[]",
    "{}",
    ",",
    ":",
    "=",
    "[[folder]]\n",
    "workers = 0\n",
    "true",
    "\u{0}",
];

fn mutate(input: &mut Vec<u8>, random: &mut fastrand::Rng) {
    let piece = PIECES[random.usize(..PIECES.len())].as_bytes();
    // The range to change is a whole number, string or name. In a text without separators it begins anywhere.
    let is_edge = |byte: &u8| b"\"[]{},:= \n".contains(byte);
    let edges: Vec<usize> = (0..input.len()).filter(|at| is_edge(&input[*at])).collect();
    let at = if edges.is_empty() { random.usize(..=input.len()) } else { edges[random.usize(..edges.len())] + 1 };
    let end = (at..input.len()).find(|end| is_edge(&input[*end])).unwrap_or(input.len());
    match random.u32(..6) {
        0 => drop(input.splice(at..end, piece.iter().copied())),
        1 => drop(input.splice(at..at, piece.iter().copied())),
        2 => drop(input.drain(at..end)),
        3 => {
            let line = input[at..end].repeat(2);
            drop(input.splice(at..end, line));
        }
        4 => input.truncate(at),
        _ => {
            if let Some(byte) = input.get_mut(at) {
                *byte ^= 1 << random.u32(..8);
            }
        }
    }
}

/// Runs the body of a fuzz target over its seeds and over mutations of their texts.
///
/// # Panics
/// As [`fuzz_targets::check`].
#[track_caller]
pub fn check(target: &str, body: fn(&[u8])) {
    fuzz_targets::check(target, |input, _, random| mutate(input, random), body);
}

/// As [`check`], with 5,000 mutations: for bodies that work on files, which take most of their time.
///
/// # Panics
/// As [`fuzz_targets::check_some`].
#[track_caller]
pub fn check_files(target: &str, body: fn(&[u8])) {
    fuzz_targets::check_some(target, FILE_MUTATIONS, |input, _, random| mutate(input, random), body);
}
