//! Reproducible mutations of JSON and TOML texts, for fuzz targets.

use std::ops::Range;

use fastrand::Rng;

/// Mutations per target whose body works on files, which take most of its time.
pub const FILE_MUTATIONS: usize = 5000;

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

/// Changes a field of a text. It may take the contents of another field from the seeds.
pub fn mutate(input: &mut Vec<u8>, seeds: &[Vec<u8>], random: &mut Rng) {
    let field = random_field(input, random);
    let start = field.start;
    match random.u32(..7) {
        0 => drop(input.splice(field, random_piece(random))),
        1 => drop(input.splice(start..start, random_piece(random))),
        2 => drop(input.drain(field)),
        3 => {
            let twice = input[field.clone()].repeat(2);
            drop(input.splice(field, twice));
        }
        4 => {
            let seed = &seeds[random.usize(..seeds.len())];
            let other = &seed[random_field(seed, random)];
            drop(input.splice(field, other.iter().copied()));
        }
        5 => input.truncate(start),
        _ => {
            if let Some(byte) = input.get_mut(start) {
                *byte ^= 1 << random.u32(..8);
            }
        }
    }
}

/// Returns the range of a whole number, string or name. In a text without separators it begins anywhere.
fn random_field(text: &[u8], random: &mut Rng) -> Range<usize> {
    let is_edge = |byte: &u8| b"\"[]{},:= \n".contains(byte);
    let edges: Vec<usize> = (0..text.len()).filter(|at| is_edge(&text[*at])).collect();
    let start = if edges.is_empty() { random.usize(..=text.len()) } else { edges[random.usize(..edges.len())] + 1 };
    let end = (start..text.len()).find(|end| is_edge(&text[*end])).unwrap_or(text.len());
    start..end
}

fn random_piece(random: &mut Rng) -> impl Iterator<Item = u8> + use<> {
    PIECES[random.usize(..PIECES.len())].bytes()
}
