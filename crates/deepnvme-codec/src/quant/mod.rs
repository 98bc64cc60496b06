//! Quantisation: 8 bits per weight and a scale per row or group. Lossy; half the bytes of bf16.
//!
//! A matrix of weights has rows of `columns` elements. Each row is divided into groups of [`Scheme::group`] elements
//! (the last may be shorter), and a group shares a scale. All arithmetic is fp32, each operation rounded once, to
//! nearest:
//!
//! | | [`CodeType::Int8`] | [`CodeType::F8E4m3`] |
//! |---|---|---|
//! | scale | `narrow(max(abs(x)) / 127)` | `narrow(max(abs(x)) / 448)` |
//! | code | `round(clamp(x / scale, -127, 127))` | `e4m3fn(clamp(x / scale, -448, 448))` |
//! | value | `narrow(code * scale)` | `narrow(code * scale)` |
//!
//! `narrow` is the [cast](crate::cast) to the type of scales or values, `round` rounds ties to even, and `e4m3fn` is
//! the nearest number of torch's `float8_e4m3fn`. A scale of zero gives codes of zero: the group is all zeros, or its
//! numbers are too small for the type of the scales (with fp16 scales below 4e-6 for int8 and below 1.4e-5 for fp8; the
//! limits of bf16 and fp32 are negligible).
//!
//! The same weights give the same bytes on every machine.

mod codes;
mod scheme;

pub use scheme::{CodeType, Scheme};

use crate::cast::{Element, F32};
use crate::half::{Bf16, F16, F32_INFINITY, F32_MAGNITUDE, Half};
use crate::{Error, Float, Result, vectorise};
use codes::{E4m3, Int8, QuantCode};

/// Calls a function that is generic over elements and codes with the types that these values name.
macro_rules! for_types {
    ($float:expr, $code:expr, $function:ident $arguments:tt) => {
        match ($float, $code) {
            (Float::Bf16, CodeType::Int8) => vectorise!($function::<Bf16, Int8, 2> $arguments),
            (Float::F16, CodeType::Int8) => vectorise!($function::<F16, Int8, 2> $arguments),
            (Float::F32, CodeType::Int8) => vectorise!($function::<F32, Int8, 4> $arguments),
            (Float::Bf16, CodeType::F8E4m3) => vectorise!($function::<Bf16, E4m3, 2> $arguments),
            (Float::F16, CodeType::F8E4m3) => vectorise!($function::<F16, E4m3, 2> $arguments),
            (Float::F32, CodeType::F8E4m3) => vectorise!($function::<F32, E4m3, 4> $arguments),
        }
    };
}

/// Quantises rows of `columns` elements of `source`. Writes one byte per element into `codes` and [`Scheme::scales`]
/// scales into `scales`, row by row.
///
/// # Errors
///
/// [`Error::Invalid`] if slices do not fit each other, an element is infinite or NaN, or the type of the scales cannot
/// represent a scale. The text names the row or the sizes.
pub fn quantise(
    scheme: Scheme,
    columns: usize,
    (from, source): (Float, &[u8]),
    codes: &mut [u8],
    scales: &mut [u8],
) -> Result<()> {
    scheme.check(columns, (from, source.len()), codes.len(), scales.len())?;
    let sizes = (columns.max(1), scheme.group_of(columns));
    let done = for_types!(from, scheme.code, quantise_groups(scheme.scale, sizes, source, codes, scales));
    done.map_err(|row| {
        let scale = scheme.scale;
        Error::invalid(format!(
            "row {row} has an infinite or NaN element, or needs a scale that {scale:?} cannot represent: leave this tensor \
             unquantised, or choose fp32 scales"
        ))
    })
}

/// Dequantises codes and scales into `target`.
///
/// # Errors
///
/// [`Error::Invalid`] if slices do not fit each other.
pub fn dequantise(
    scheme: Scheme,
    columns: usize,
    codes: &[u8],
    scales: &[u8],
    (to, target): (Float, &mut [u8]),
) -> Result<()> {
    scheme.check(columns, (to, target.len()), codes.len(), scales.len())?;
    let sizes = (columns.max(1), scheme.group_of(columns));
    for_types!(to, scheme.code, dequantise_groups(scheme.scale, sizes, codes, scales, target));
    Ok(())
}

/// Quantises all groups. Returns the row of the first that fails.
#[inline(always)]
fn quantise_groups<E: Element<N>, C: QuantCode, const N: usize>(
    scale_float: Float,
    (columns, group): (usize, usize),
    source: &[u8],
    codes: &mut [u8],
    scales: &mut [u8],
) -> Result<(), usize> {
    let mut scales = scales.chunks_exact_mut(scale_float.bytes());
    let rows = source.as_chunks::<N>().0.chunks(columns).zip(codes.chunks_mut(columns));
    for (row, (elements, codes)) in rows.enumerate() {
        for (elements, codes) in elements.chunks(group).zip(codes.chunks_mut(group)) {
            // The bits of non-negative floats order like the numbers, with infinity and then NaNs above them.
            let max = elements.iter().map(|bytes| E::widen(*bytes) & F32_MAGNITUDE).fold(0, u32::max);
            let scale = scales.next().map_or(0, |bytes| write_scale(scale_float, f32::from_bits(max) / C::MAX, bytes));
            if max >= F32_INFINITY || scale >= F32_INFINITY {
                return Err(row);
            }
            let scale = f32::from_bits(scale);
            if scale == 0.0 {
                codes.fill(0);
                continue;
            }
            for (code, bytes) in codes.iter_mut().zip(elements) {
                let value = f32::from_bits(E::widen(*bytes)) / scale;
                *code = C::encode(value.clamp(-C::MAX, C::MAX));
            }
        }
    }
    Ok(())
}

/// Dequantises all groups.
#[inline(always)]
fn dequantise_groups<E: Element<N>, C: QuantCode, const N: usize>(
    scale_float: Float,
    (columns, group): (usize, usize),
    codes: &[u8],
    scales: &[u8],
    target: &mut [u8],
) {
    let mut scales = scales.chunks_exact(scale_float.bytes());
    for (elements, codes) in target.as_chunks_mut::<N>().0.chunks_mut(columns).zip(codes.chunks(columns)) {
        for (elements, codes) in elements.chunks_mut(group).zip(codes.chunks(group)) {
            let scale = scales.next().map_or(0.0, |bytes| read_scale(scale_float, bytes));
            for (element, code) in elements.iter_mut().zip(codes) {
                *element = E::narrow((C::decode(*code) * scale).to_bits());
            }
        }
    }
}

/// Writes a scale. Returns the rounded value as fp32 bits: codes are relative to it.
#[inline(always)]
fn write_scale(float: Float, scale: f32, bytes: &mut [u8]) -> u32 {
    match float {
        Float::Bf16 => {
            let half = <Bf16 as Half>::narrow(scale.to_bits());
            bytes.copy_from_slice(&half.to_le_bytes());
            <Bf16 as Half>::widen(half)
        }
        Float::F16 => {
            let half = <F16 as Half>::narrow(scale.to_bits());
            bytes.copy_from_slice(&half.to_le_bytes());
            <F16 as Half>::widen(half)
        }
        Float::F32 => {
            bytes.copy_from_slice(&scale.to_le_bytes());
            scale.to_bits()
        }
    }
}

/// Reads a scale.
#[inline(always)]
fn read_scale(float: Float, bytes: &[u8]) -> f32 {
    let bits = match float {
        Float::Bf16 => bytes.first_chunk().map(|bytes| <Bf16 as Element<2>>::widen(*bytes)),
        Float::F16 => bytes.first_chunk().map(|bytes| <F16 as Element<2>>::widen(*bytes)),
        Float::F32 => bytes.first_chunk().map(|bytes| F32::widen(*bytes)),
    };
    f32::from_bits(bits.unwrap_or(0))
}
