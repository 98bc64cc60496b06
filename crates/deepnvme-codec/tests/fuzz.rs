//! The fuzz targets, over their seeds and mutations of bytes.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

mod fuzz_bodies;

use std::fs;

use deepnvme_codec::{Float, pack};
use deepnvme_testkit::fuzz_targets;
use deepnvme_testkit::fuzz_targets::seed_folder;

fn mutate(input: &mut Vec<u8>, random: &mut fastrand::Rng) {
    let at = random.usize(..=input.len());
    match random.u32(..6) {
        0 if at < input.len() => input[at] ^= 1 << random.u32(..8),
        1 if at < input.len() => input[at] = random.u8(..),
        // Most validation is of headers.
        2 if input.len() > 40 => input[random.usize(4..40)] = *random.choice(&[0, 1, 2, 3, 8, 64, 255]).unwrap(),
        3 => input.truncate(at),
        4 => input.insert(at, random.u8(..)),
        _ => {
            let end = random.usize(at..=input.len());
            let piece = input[at..end].to_vec();
            input.extend(piece);
        }
    }
}

fuzz_targets! {
    |input, _, random| mutate(input, random);
    packed_blocks: "packed", fuzz_bodies::packed;
    any_elements: "elements", fuzz_bodies::elements;
}

/// Rewrites `fuzz/seeds` after a change of the format.
#[test]
#[ignore = "writes into the source tree"]
fn write_seeds() {
    let mut random = fastrand::Rng::with_seed(7);
    for (index, float) in Float::ALL.into_iter().enumerate() {
        for (name, elements, spread) in [("empty", 0, 1), ("few", 65, 3), ("layers", 500, 9), ("raw", 200, 1 << 14)] {
            // Products of few factors: small exponents are rarer.
            let mut bytes: Vec<u8> = Vec::new();
            for _ in 0..elements {
                let size = random.u32(..spread).min(random.u32(..spread)).min(random.u32(..spread));
                let bits = match float {
                    Float::Bf16 => (0x3c00 + (size << 7)) ^ random.u32(..128),
                    Float::F16 => (0x1800 + (size << 10)) ^ random.u32(..1024),
                    Float::F32 => 0x3c00_0000_u32.wrapping_add(size << 23) ^ random.u32(..1 << 23),
                };
                bytes.extend(&bits.to_le_bytes()[..float.bytes()]);
            }
            let mut packed = Vec::new();
            pack::encode(float, &bytes, &mut packed).unwrap();
            let name = format!("{name}-{}", format!("{float:?}").to_lowercase());
            bytes.splice(..0, [index as u8 | random.u8(..) & 0x60, 30]);
            for (target, content) in [("packed", packed), ("elements", bytes)] {
                fs::create_dir_all(seed_folder(target)).unwrap();
                fs::write(seed_folder(target).join(&name), content).unwrap();
            }
        }
    }
}
