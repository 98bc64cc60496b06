//! Quantised weights against the documented formulas, and the codes against all of their values.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::num::NonZeroUsize;

use deepnvme_codec::quant::{CodeType, Scheme, dequantise, quantise};
use deepnvme_codec::{Error, Float, cast};
use proptest::prelude::*;

/// Returns the value of a `float8_e4m3fn` code by its definition.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = match (exponent, code & 7) {
        (0, _) => mantissa * 2_f32.powi(-9),
        (15, 7) => f32::NAN,
        _ => (1.0 + mantissa / 8.0) * 2_f32.powi(exponent - 7),
    };
    if code & 0x80 == 0 { size } else { -size }
}

fn convert(from: Float, to: Float, bytes: &[u8]) -> Vec<u8> {
    let mut out = vec![0; bytes.len() / from.bytes() * to.bytes()];
    cast::convert(from, to, bytes, &mut out).unwrap();
    out
}

fn wide(float: Float, bytes: &[u8]) -> Vec<f32> {
    convert(float, Float::F32, bytes).as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn short(float: Float, value: f32) -> Vec<u8> {
    convert(Float::F32, float, &value.to_le_bytes())
}

/// Computes codes and scales element by element.
fn plain(scheme: Scheme, columns: usize, values: &[f32]) -> (Vec<u8>, Vec<u8>) {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for row in values.chunks(columns) {
        for group in row.chunks(scheme.group.map_or(columns, NonZeroUsize::get)) {
            let most = group.iter().fold(0.0, |most: f32, value| most.max(value.abs()));
            let top = if scheme.code == CodeType::Int8 { 127.0 } else { 448.0 };
            let scale = short(scheme.scale, most / top);
            scales.extend_from_slice(&scale);
            let scale = wide(scheme.scale, &scale)[0];
            for value in group {
                codes.push(if scale == 0.0 {
                    0
                } else if scheme.code == CodeType::Int8 {
                    (value / scale).clamp(-top, top).round_ties_even() as i8 as u8
                } else {
                    nearest_e4m3((value / scale).clamp(-top, top))
                });
            }
        }
    }
    (codes, scales)
}

fn nearest_e4m3(value: f32) -> u8 {
    let distance = |code: u8| (f64::from(e4m3(code)) - f64::from(value.abs())).abs();
    let mut best = 0;
    for code in 0..0x7f {
        let (old, new) = (distance(best), distance(code));
        if new < old || (new == old && code % 2 == 0) {
            best = code;
        }
    }
    best | if value.is_sign_negative() { 0x80 } else { 0 }
}

/// Returns the values of codes and scales.
fn meant(scheme: Scheme, columns: usize, codes: &[u8], scales: &[u8], to: Float) -> Vec<u8> {
    let (mut out, mut scales) = (Vec::new(), wide(scheme.scale, scales).into_iter());
    for row in codes.chunks(columns) {
        for group in row.chunks(scheme.group.map_or(columns, NonZeroUsize::get)) {
            let scale = scales.next().unwrap();
            for code in group {
                let number = if scheme.code == CodeType::Int8 { f32::from(*code as i8) } else { e4m3(*code) };
                out.extend(short(to, number * scale));
            }
        }
    }
    out
}

fn quantised(scheme: Scheme, columns: usize, float: Float, bytes: &[u8]) -> Result<(Vec<u8>, Vec<u8>), Error> {
    let elements = bytes.len() / float.bytes();
    let scales = scheme.scales(elements / columns.max(1), columns).unwrap() * scheme.scale.bytes();
    let (mut codes, mut scales) = (vec![0xee; elements], vec![0xee; scales]);
    quantise(scheme, columns, (float, bytes), &mut codes, &mut scales)?;
    Ok((codes, scales))
}

fn schemes() -> impl Strategy<Value = Scheme> {
    let group = prop_oneof![Just(0), Just(64), Just(128), 1..200_usize];
    let code = prop_oneof![Just(CodeType::Int8), Just(CodeType::F8E4m3)];
    (code, group, 0..3_usize).prop_map(|(code, group, scale)| Scheme {
        code,
        group: NonZeroUsize::new(group),
        scale: Float::ALL[scale],
    })
}

proptest! {
    #[test]
    fn both_directions_match_the_formulas(
        scheme in schemes(), which in 0..3_usize, to in 0..3_usize, rows in 0..5_usize, columns in 1..300_usize, seed: u64,
    ) {
        let (float, to) = (Float::ALL[which], Float::ALL[to]);
        let mut random = fastrand::Rng::with_seed(seed);
        let size = 10_f32.powi(random.i32(-3..2));
        let values: Vec<u8> = (0..rows * columns)
            .flat_map(|_| (size * (random.f32() - 0.5) * random.f32()).to_le_bytes())
            .collect();
        let bytes = convert(Float::F32, float, &values);
        let (codes, scales) = quantised(scheme, columns, float, &bytes).unwrap();
        prop_assert_eq!((&codes, &scales), (&plain(scheme, columns, &wide(float, &bytes)).0, &plain(scheme, columns, &wide(float, &bytes)).1));
        let mut out = vec![0xee; rows * columns * to.bytes()];
        dequantise(scheme, columns, &codes, &scales, (to, &mut out)).unwrap();
        prop_assert_eq!(out, meant(scheme, columns, &codes, &scales, to));
    }

    #[test]
    fn int8_error_is_at_most_half_a_step(columns in 1..300_usize, seed: u64) {
        let scheme = Scheme { code: CodeType::Int8, group: NonZeroUsize::new(64), scale: Float::F32 };
        let mut random = fastrand::Rng::with_seed(seed);
        let values: Vec<f32> = (0..columns).map(|_| random.f32() - 0.5).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let (codes, scales) = quantised(scheme, columns, Float::F32, &bytes).unwrap();
        let mut out = vec![0; bytes.len()];
        dequantise(scheme, columns, &codes, &scales, (Float::F32, &mut out)).unwrap();
        for (index, (was, is)) in values.iter().zip(wide(Float::F32, &out)).enumerate() {
            let step = wide(Float::F32, &scales)[index / 64];
            prop_assert!((was - is).abs() <= 0.5001 * step, "{was} became {is} in steps of {step}");
        }
    }
}

#[test]
fn every_code_has_its_value() {
    let codes: Vec<u8> = (0..=255).collect();
    for (code, number) in [(CodeType::Int8, (|code| f32::from(code as i8)) as fn(u8) -> f32), (CodeType::F8E4m3, e4m3)]
    {
        let scheme = Scheme { code, group: None, scale: Float::F32 };
        let mut out = vec![0; 1024];
        dequantise(scheme, 256, &codes, &1_f32.to_le_bytes(), (Float::F32, &mut out)).unwrap();
        for (code, got) in codes.iter().zip(wide(Float::F32, &out)) {
            let number = number(*code);
            assert!(
                got.to_bits() == number.to_bits() || got.is_nan() && number.is_nan(),
                "{code}: {got}, not {number}"
            );
        }
    }
}

#[test]
fn e4m3_rounds_to_the_nearest_code() {
    let mut values = vec![448.0];
    for code in 0..0x7e {
        let (here, next) = (e4m3(code), e4m3(code + 1));
        let middle = (here + next) / 2.0;
        values.extend([here, middle, middle.next_up(), middle.next_down(), -here, -middle]);
    }
    // The largest value is 448, so the scale is one.
    let bytes: Vec<u8> = values.iter().flat_map(|value: &f32| value.to_le_bytes()).collect();
    let scheme = Scheme { code: CodeType::F8E4m3, group: None, scale: Float::F32 };
    let (codes, scales) = quantised(scheme, values.len(), Float::F32, &bytes).unwrap();
    assert_eq!(wide(Float::F32, &scales), [1.0]);
    for (value, code) in values.iter().zip(codes) {
        assert_eq!(code, nearest_e4m3(*value), "{value}");
    }
}

#[test]
fn zeros_stay_zeros_and_tiny_weights_may_underflow() {
    let scheme = Scheme { code: CodeType::Int8, group: None, scale: Float::F16 };
    for (value, expected) in [(0.0, 0), (1e-7, 0), (1e-3, 127)] {
        let bytes = f32::to_le_bytes(value).repeat(70);
        let (codes, _) = quantised(scheme, 70, Float::F32, &bytes).unwrap();
        assert_eq!(codes, vec![expected; 70], "{value}");
    }
}

#[test]
fn errors_name_the_row() {
    let scheme = Scheme { code: CodeType::Int8, group: NonZeroUsize::new(2), scale: Float::F16 };
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN, 1e9] {
        let mut values = [1_f32; 12];
        values[7] = bad;
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let error = quantised(scheme, 4, Float::F32, &bytes).unwrap_err().to_string();
        assert!(error.contains("row 1") && error.contains("F16"), "{error}");
    }
}

#[test]
fn mismatched_slices_are_refused() {
    let scheme = Scheme { code: CodeType::Int8, group: NonZeroUsize::new(64), scale: Float::F16 };
    assert_eq!(scheme.scales(3, 130), Some(9));
    assert_eq!(scheme.scales(3, 0), Some(0));
    assert_eq!(scheme.scales(usize::MAX, 130), None);
    for (columns, codes, scales, bytes) in [
        (130, 390, 18, 778),
        (130, 391, 18, 782),
        (130, 390, 16, 780),
        (130, 390, 20, 780),
        (0, 390, 18, 780),
        (130, 0, 2, 0),
    ] {
        let (mut codes, mut scales) = (vec![0; codes], vec![0; scales]);
        let source = vec![0; bytes];
        let error = quantise(scheme, columns, (Float::Bf16, &source), &mut codes, &mut scales).unwrap_err();
        assert!(error.to_string().contains("do not match"), "{error}");
        assert!(dequantise(scheme, columns, &codes, &scales, (Float::Bf16, &mut vec![0; bytes])).is_err());
    }
    for columns in [0, 1, 130] {
        quantise(scheme, columns, (Float::Bf16, &[]), &mut [], &mut []).unwrap();
        dequantise(scheme, columns, &[], &[], (Float::Bf16, &mut [])).unwrap();
    }
}
