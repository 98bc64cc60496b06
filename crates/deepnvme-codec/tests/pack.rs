//! Packing: lossless, stable format, errors for damage.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

mod reference;

use deepnvme_codec::pack::{self, BlockHeader, PackedBlock, Scratch};
use deepnvme_codec::{Error, Float, cast};
use proptest::prelude::*;

fn packed(float: Float, bytes: &[u8]) -> Vec<u8> {
    let mut packed = Vec::new();
    pack::encode(float, bytes, &mut packed).unwrap();
    packed
}

fn unpacked(packed: &[u8]) -> Result<Vec<u8>, Error> {
    let block = PackedBlock::parse(packed)?;
    let mut out = vec![0x5a; block.header().decoded_bytes()];
    block.decode_into(&mut out)?;
    Ok(out)
}

#[track_caller]
fn check(float: Float, bytes: &[u8]) -> Vec<u8> {
    let packed = packed(float, bytes);
    assert!(packed.len() <= pack::encoded_bytes_max(bytes.len()));
    assert!(unpacked(&packed).unwrap() == bytes, "{float:?}, {} bytes", bytes.len());
    assert!(reference::decode(&packed).unwrap() == (bytes.to_vec(), packed.len()), "{float:?}, as written down");
    packed
}

/// Returns normally distributed weights of a type.
fn gaussian(float: Float, elements: usize, random: &mut fastrand::Rng) -> Vec<u8> {
    let mut wide = Vec::new();
    for _ in 0..elements {
        let radius = (-2.0 * (1.0 - random.f64()).ln()).sqrt();
        wide.extend(((0.02 * radius * (std::f64::consts::TAU * random.f64()).cos()) as f32).to_le_bytes());
    }
    let mut bytes = vec![0; elements * float.bytes()];
    cast::convert(Float::F32, float, &wide, &mut bytes).unwrap();
    bytes
}

/// Returns elements whose exponents have `values` values, each half as frequent as the one before.
fn elements(float: Float, count: usize, values: u32, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let base = random.u32(..);
    let mut bytes = Vec::new();
    for _ in 0..count {
        let exponent = base.wrapping_add(random.u32(..).trailing_zeros().min(values).wrapping_mul(37));
        let bits = match float {
            Float::Bf16 => (exponent & 0xff) << 7 | random.u32(..) & 0x807f,
            Float::F16 => (exponent & 0x1f) << 10 | random.u32(..) & 0x83ff,
            Float::F32 => (exponent & 0xff) << 23 | random.u32(..) & 0x807f_ffff,
        };
        bytes.extend(&bits.to_le_bytes()[..float.bytes()]);
    }
    bytes
}

proptest! {
    #[test]
    fn every_bit_round_trips(seed: u64, which in 0..3_usize, count in 0..5000_usize, values in 0..32_u32) {
        let float = Float::ALL[which];
        check(float, &elements(float, count, values, seed));
    }

    #[test]
    fn any_bytes_round_trip(bytes in proptest::collection::vec(any::<u8>(), 0..3000), which in 0..3_usize) {
        let float = Float::ALL[which];
        check(float, &bytes[..bytes.len() / float.bytes() * float.bytes()]);
    }

    #[test]
    fn damage_is_an_error_or_other_elements(
        seed: u64, which in 0..3_usize, damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut packed = packed(Float::ALL[which], &elements(Float::ALL[which], 1000, 12, seed));
        for (index, byte) in damage {
            let at = index.index(packed.len().min(100));
            packed[at] = byte;
        }
        prop_assert_eq!(unpacked(&packed).ok(), reference::decode(&packed).map(|(out, _)| out));
    }
}

#[test]
fn every_half_round_trips() {
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for float in [Float::Bf16, Float::F16] {
        assert!(PackedBlock::parse(&check(float, &all)).unwrap().is_raw(), "nothing to gain");
        // With enough zeros that the block is packed, so that every number passes through the layers.
        let mut mixed = vec![0; 1 << 20];
        mixed.extend_from_slice(&all);
        assert!(!PackedBlock::parse(&check(float, &mixed)).unwrap().is_raw());
    }
}

#[test]
fn sizes_around_groups_and_steps() {
    for float in Float::ALL {
        for count in [0, 1, 2, 63, 64, 65, 127, 128, 129, 2047, 2048, 2049, 4096, 4159, pack::BLOCK_ELEMENTS_MAX] {
            for values in [0, 2, 9] {
                check(float, &elements(float, count, values, count as u64));
            }
        }
    }
}

#[test]
fn weights_take_the_documented_bytes() {
    let mut random = fastrand::Rng::with_seed(3);
    for (float, most) in [(Float::Bf16, 0.67), (Float::F16, 0.86), (Float::F32, 0.84)] {
        let weights = gaussian(float, pack::BLOCK_ELEMENTS, &mut random);
        let part = check(float, &weights).len() as f64 / weights.len() as f64;
        assert!(part < most, "{float:?}: {part}");
    }
    let zeros = packed(Float::Bf16, &vec![0; 2 << 16]).len() as f64 / f64::from(2 << 16);
    assert!(zeros < 0.626, "{zeros}");
}

#[test]
fn noise_is_stored_raw() {
    let mut random = fastrand::Rng::with_seed(4);
    let noise: Vec<u8> = (0..1 << 16).map(|_| random.u8(..)).collect();
    for float in [Float::Bf16, Float::F32] {
        let packed = check(float, &noise);
        assert_eq!(packed.len(), noise.len() + pack::HEADER_BYTES);
        assert!(PackedBlock::parse(&packed).unwrap().is_raw());
    }
}

#[test]
fn blocks_follow_each_other_and_share_scratch() {
    let mut random = fastrand::Rng::with_seed(5);
    let (mut file, mut expected) = (Vec::new(), Vec::new());
    for round in 0..40 {
        let float = Float::ALL[round % 3];
        let values = random.u32(..20);
        let bytes = elements(float, random.usize(..9000), values, random.u64(..));
        pack::encode(float, &bytes, &mut file).unwrap();
        expected.push((float, bytes));
    }
    let (mut rest, mut scratch) = (file.as_slice(), Scratch::default());
    for (float, bytes) in expected {
        let header = BlockHeader::parse(&rest[..pack::HEADER_BYTES]).unwrap();
        let block = PackedBlock::parse(rest).unwrap();
        assert_eq!((*block.header(), header.float(), header.decoded_bytes()), (header, float, bytes.len()));
        let mut out = vec![1; bytes.len()];
        block.decode_with(&mut scratch, &mut out).unwrap();
        assert!(out == bytes);
        rest = &rest[header.encoded_bytes()..];
    }
    assert!(rest.is_empty());
}

#[test]
fn a_short_block_is_an_error() {
    for float in Float::ALL {
        let packed = packed(float, &elements(float, 300, 9, 1));
        for len in 0..packed.len() {
            assert!(matches!(PackedBlock::parse(&packed[..len]), Err(Error::Corrupt { .. })), "{len}");
        }
    }
}

#[test]
fn invalid_headers_are_errors() {
    let good = packed(Float::Bf16, &elements(Float::Bf16, 300, 9, 1));
    assert!(!PackedBlock::parse(&good).unwrap().is_raw());
    for (at, byte, text) in [
        (0, b'X', "known version"),
        (3, 2, "known version"),
        (4, 0, "element type"),
        (4, 4, "element type"),
        (5, 0, "cannot take"),
        (5, 9, "layers"),
        (6, 1, "reserved"),
        (10, 0x11, "maximum"),
        (12, good[12] ^ 1, "states"),
        (15, 0xff, "cannot take"),
        (19, 1, "reserved"),
        (22, 1, "escape"),
    ] {
        let mut bad = good.clone();
        bad[at] = byte;
        bad.push(0);
        let error = PackedBlock::parse(&bad).unwrap_err().to_string();
        assert!(error.contains(text), "{at}: {error}");
    }
}

#[test]
fn codes_that_do_not_match_the_sizes() {
    let good = packed(Float::Bf16, &elements(Float::Bf16, 300, 9, 1));
    let planes = 16 + 8 * usize::from(good[5]) + 300;
    let known = (0..8).find(|bit| (good[planes] & good[planes + 8]) >> bit & 1 == 0).unwrap();
    let mut one_more_escape = good.clone();
    one_more_escape[planes] |= 1 << known;
    one_more_escape[planes + 8] |= 1 << known;
    let mut all_escape = good.clone();
    all_escape[planes..planes + 5 * 16].fill(0xff);
    let mut no_escape = good.clone();
    no_escape[planes..planes + 5 * 16].fill(0);
    // The last group has 300 - 4 * 64 elements: this bit is padding.
    let mut in_the_padding = good;
    in_the_padding[planes + 4 * 16 + 5] |= 0x40;
    for bad in [one_more_escape, all_escape, no_escape, in_the_padding] {
        let error = unpacked(&bad).unwrap_err();
        assert!(error.to_string().contains("do not match"), "{error}");
    }
}

#[test]
fn mismatched_slices_are_refused() {
    let mut out = Vec::new();
    assert!(matches!(pack::encode(Float::F32, &[0; 6], &mut out), Err(Error::Invalid(_))));
    let large = vec![0; 2 * pack::BLOCK_ELEMENTS_MAX + 2];
    assert!(matches!(pack::encode(Float::F16, &large, &mut out), Err(Error::Invalid(_))));
    assert!(out.is_empty());
    let packed = packed(Float::Bf16, &elements(Float::Bf16, 300, 9, 1));
    let block = PackedBlock::parse(&packed).unwrap();
    for len in [0, 599, 601] {
        assert!(matches!(block.decode_into(&mut vec![0; len]), Err(Error::Invalid(_))));
    }
}

#[test]
fn the_format_is_version_one() {
    // Weights with five exponents. The bytes must never change.
    let mut bytes: Vec<u8> = (0..70_u16).flat_map(|i| (0x3c00 + i % 7 * 0x81 % 0x200).to_le_bytes()).collect();
    bytes.splice(20..22, [0x01, 0xc0]);
    let packed = check(Float::Bf16, &bytes);
    let hex: String = packed.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, GOLDEN);
}

/// Header, layer, signs and mantissas, planes, tail.
const GOLDEN: &str = concat!(
    "444e5001010100004600000088000000",
    "78797a000a000000",
    "00010203040506000102810405060001020304050600010203040506000102030405060001020304050600010203040506000102030405060001020304050600010203040506",
    "2a954aa552a9542a4c2693c96432994c15000000000000002600000000000000",
    "7b807b7b7b7b7b7b7b7b",
);
