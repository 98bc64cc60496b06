//! Casts against fp64 arithmetic that searches the nearest number, and against the table of NaNs.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use deepnvme_codec::Float::{Bf16, F16, F32};
use deepnvme_codec::{Error, Float, cast};

/// Returns the value of the bits of a type by its definition; `None` for NaNs.
fn number(float: Float, bits: u32) -> Option<f64> {
    let (exponent_bits, mantissa_bits) = match float {
        Bf16 => (8, 7),
        F16 => (5, 10),
        F32 => (8, 23),
    };
    let mantissa = f64::from(bits & ((1 << mantissa_bits) - 1));
    let exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
    let (bias, unit) = ((1 << (exponent_bits - 1)) - 1, 2_f64.powi(-mantissa_bits));
    let size = match exponent {
        0 => mantissa * unit * 2_f64.powi(1 - bias),
        top if top == (1 << exponent_bits) - 1 => (mantissa == 0.0).then_some(f64::INFINITY)?,
        exponent => (1.0 + mantissa * unit) * 2_f64.powi(exponent as i32 - bias),
    };
    Some(if bits >> (mantissa_bits + exponent_bits) & 1 == 1 { -size } else { size })
}

/// Returns all magnitudes of a 16-bit type from zero to infinity, indexed by their bits. The entry of infinity is the
/// value that would follow the largest number.
fn sizes(float: Float) -> Vec<f64> {
    let mut sizes: Vec<f64> = (0..0x8000).map_while(|bits| number(float, bits)).collect();
    let last = sizes.len() - 1;
    sizes[last] = 2.0 * sizes[last - 1] - sizes[last - 2];
    sizes
}

/// Returns the bits of the nearest number, ties to even.
fn nearest(sizes: &[f64], value: f64) -> u32 {
    let (sign, size) = (u32::from(value.is_sign_negative()) << 15, value.abs());
    let above = sizes.partition_point(|other| *other < size);
    if above == sizes.len() || above == 0 {
        return sign | above.min(sizes.len() - 1) as u32;
    }
    let (down, up) = (size - sizes[above - 1], sizes[above] - size);
    let take_up = if down == up { above % 2 == 0 } else { up < down };
    sign | (above - usize::from(!take_up)) as u32
}

/// Casts many elements at once, between odd addresses.
fn cast_all(from: Float, to: Float, all: &[u32]) -> Vec<u32> {
    let mut source = vec![0xee];
    for bits in all {
        source.extend(&bits.to_le_bytes()[..from.bytes()]);
    }
    let mut target = vec![0xdd; 1 + all.len() * to.bytes() + 1];
    let end = target.len() - 1;
    cast::convert(from, to, &source[1..], &mut target[1..end]).unwrap();
    assert_eq!((target[0], target[end]), (0xdd, 0xdd));
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte));
    target[1..end].chunks(to.bytes()).map(word).collect()
}

fn narrow(to: Float, all: &[u32]) {
    let sizes = sizes(to);
    for (bits, got) in all.iter().zip(cast_all(F32, to, all)) {
        match number(F32, *bits) {
            Some(value) => assert_eq!(got, nearest(&sizes, value), "{bits:08x} to {to:?}"),
            None => assert_eq!(number(to, got), None, "{bits:08x} to {to:?}"),
        }
    }
}

#[test]
fn every_half_widens_exactly_and_round_trips() {
    let all: Vec<u32> = (0..=0xffff).collect();
    for float in [Bf16, F16] {
        let wide = cast_all(float, F32, &all);
        let back = cast_all(F32, float, &wide);
        for ((bits, wide), back) in all.iter().zip(&wide).zip(back) {
            let value = number(float, *bits);
            assert_eq!(number(F32, *wide), value, "{bits:04x} of {float:?}");
            match value {
                Some(value) => assert_eq!((back, wide >> 31), (*bits, u32::from(value.is_sign_negative()))),
                None => assert_eq!(number(float, back), None),
            }
        }
    }
}

#[test]
fn neighbours_of_every_half_are_rounded_to_nearest() {
    let lows =
        [0, 1, 0xfff, 0x1000, 0x1001, 0x1fff, 0x2fff, 0x3000, 0x3001, 0x7fff, 0x8000, 0x8001, 0xefff, 0xf000, 0xffff];
    let all: Vec<u32> = (0..=0xffff).flat_map(|high| lows.map(|low| high << 16 | low)).collect();
    narrow(Bf16, &all);
    narrow(F16, &all);
}

#[test]
fn random_numbers_are_rounded_to_nearest() {
    let mut random = fastrand::Rng::with_seed(8);
    let any = (0..500_000).map(|_| random.u32(..)).collect::<Vec<_>>();
    // The ranges of fp16's subnormals and of its largest numbers.
    let small = (0..500_000).map(|_| random.u32(0x3200_0000..0x3900_0000) | random.u32(..) & 1 << 31);
    let small = small.collect::<Vec<_>>();
    let large = (0..500_000).map(|_| random.u32(0x4700_0000..0x4780_0000)).collect::<Vec<_>>();
    for all in [any, small, large] {
        narrow(Bf16, &all);
        narrow(F16, &all);
    }
}

#[test]
fn casts_between_halves_go_through_fp32() {
    let all: Vec<u32> = (0..=0xffff).collect();
    for (from, to) in [(Bf16, F16), (F16, Bf16)] {
        assert_eq!(cast_all(from, to, &all), cast_all(F32, to, &cast_all(from, F32, &all)));
    }
}

#[test]
fn nans_match_the_table() {
    let nans = |from, to, nan| cast_all(from, to, &[nan])[0];
    assert_eq!(nans(Bf16, F32, 0xff81), 0xff81_0000);
    assert_eq!(nans(F16, F32, 0x7c01), 0x7fc0_2000);
    assert_eq!(nans(F16, F32, 0xfe12), 0xffc2_4000);
    assert_eq!(nans(F32, F16, 0x7f80_0001), 0x7e00);
    assert_eq!(nans(F32, F16, 0xffc1_2345), 0xfe09);
    assert_eq!(nans(F32, Bf16, 0xffff_ffff), 0x7fc0);
    assert_eq!(nans(F32, Bf16, 0x7f80_0001), 0x7fc0);
    assert_eq!(nans(F16, Bf16, 0xfc01), 0x7fc0);
}

#[test]
fn the_same_type_is_a_copy() {
    let all: Vec<u32> = (0..=0xffff).collect();
    for float in [Bf16, F16] {
        assert_eq!(cast_all(float, float, &all), all);
    }
    let wide: Vec<u32> = all.iter().map(|bits| bits.wrapping_mul(0x9e37_79b9)).collect();
    assert_eq!(cast_all(F32, F32, &wide), wide);
}

#[test]
fn every_length_is_cast_completely() {
    let mut random = fastrand::Rng::with_seed(9);
    for from in Float::ALL {
        for to in Float::ALL {
            let all: Vec<u32> = (0..200).map(|_| random.u32(..) >> (32 - 8 * from.bytes() as u32)).collect();
            let whole = cast_all(from, to, &all);
            for len in 0..200 {
                assert_eq!(cast_all(from, to, &all[..len]), whole[..len]);
            }
        }
    }
}

#[test]
fn mismatched_slices_are_refused() {
    for (from, to, source, target) in [(F32, Bf16, 6, 2), (F32, Bf16, 8, 2), (Bf16, F32, 8, 8), (F16, F16, 4, 2)] {
        let error = cast::convert(from, to, &vec![0; source], &mut vec![0; target]).unwrap_err();
        assert!(matches!(&error, Error::Invalid(text) if text.contains("whole elements")), "{error}");
    }
}
