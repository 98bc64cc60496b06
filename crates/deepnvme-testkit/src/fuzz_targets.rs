//! Runs fuzz targets over their seeds, and each over 20,000 mutations of its seeds. Deterministic, and without a
//! nightly toolchain.

use std::fs;
use std::path::{Path, PathBuf};

use fastrand::Rng;

/// Mutations per target, over all its seeds.
pub const MUTATIONS: usize = 20_000;
/// Maximum mutations of one input.
const MUTATIONS_PER_INPUT_MAX: usize = 4;
const INPUT_BYTES_MAX: usize = 64 << 10;

/// Returns the folder of a target's seeds.
#[must_use]
pub fn seed_folder(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds").join(target)
}

/// Runs the body of a fuzz target over its seeds, then over this number of mutations of them. `mutate` changes an input, and
/// may take pieces of the seeds. The mutations are the same in each run.
///
/// # Panics
/// As the body does, or if the target has no seeds.
#[track_caller]
pub fn check(target: &str, mutations: usize, mutate: impl Fn(&mut Vec<u8>, &[Vec<u8>], &mut Rng), body: fn(&[u8])) {
    let mut paths: Vec<_> = fs::read_dir(seed_folder(target)).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let seeds: Vec<Vec<u8>> = paths.iter().map(|path| fs::read(path).unwrap()).collect();
    assert!(!seeds.is_empty(), "no seeds of {target}");
    seeds.iter().for_each(|seed| body(seed));
    let mut random = Rng::with_seed(target.len() as u64);
    for round in 0..mutations {
        let mut input = seeds[round % seeds.len()].clone();
        for _ in 0..=random.usize(..MUTATIONS_PER_INPUT_MAX) {
            mutate(&mut input, &seeds, &mut random);
            input.truncate(INPUT_BYTES_MAX);
        }
        body(&input);
    }
}

/// Defines a test per fuzz target: its name, the target, and the body. The first line is the function that mutates an
/// input, after the number of mutations per target if that is not 20,000.
#[macro_export]
macro_rules! fuzz_targets {
    ($mutations:expr, $mutate:expr; $($name:ident: $target:literal, $body:expr;)*) => {
        $(
            #[test]
            fn $name() {
                $crate::fuzz_targets::check($target, $mutations, $mutate, $body);
            }
        )*
    };
    ($mutate:expr; $($targets:tt)*) => {
        $crate::fuzz_targets! { $crate::fuzz_targets::MUTATIONS, $mutate; $($targets)* }
    };
}
