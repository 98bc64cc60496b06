//! Eight bits for each weight, and a scale for each row or group of them: lossy, half of bf16's bytes.
//!
//! A matrix of weights has rows of `columns` elements; each row is cut into groups of [`Scheme::group`] elements (the last
//! may be shorter), and a group shares a scale. All arithmetic is that of fp32, each operation rounded once, to the nearest:
//!
//! | | [`Code::Int8`] | [`Code::F8E4m3`] |
//! |---|---|---|
//! | scale | `narrow(max(abs(x)) / 127)` | `narrow(max(abs(x)) / 448)` |
//! | code | `round(clamp(x / scale, -127, 127))` | `e4m3fn(clamp(x / scale, -448, 448))` |
//! | value | `narrow(code * scale)` | `narrow(code * scale)` |
//!
//! `narrow` is the [cast](crate::cast) to the type of scales or of values, `round` goes to the even one of two that are as
//! near, and `e4m3fn` is the nearest number of torch's `float8_e4m3fn`. A scale of zero makes codes of zero: that is a group
//! of zeros, or one of numbers so small that the type of the scales cannot tell (in fp16 below 4e-6; bf16 and fp32
//! have no such limit that matters).
//!
//! The same weights give the same bytes on every machine.

mod codes;
mod scheme;

pub use scheme::{Code, Scheme};

use crate::cast::{Bf16, Element, F16, F32, INFINITY};
use crate::{Error, Float, Result, widest};
use codes::{Coded, E4m3, Int8};

/// Quantises rows of `columns` elements of `source`: a byte each into `codes`, and as many scales as
/// [`Scheme::scales`] says into `scales`, row by row.
///
/// # Errors
///
/// [`Error::Invalid`] where slices do not fit each other, where an element is infinite or no number, or where the type
/// of the scales is too narrow for one; the text says which.
pub fn quantise(
    scheme: Scheme,
    columns: usize,
    (from, source): (Float, &[u8]),
    codes: &mut [u8],
    scales: &mut [u8],
) -> Result<()> {
    scheme.check(columns, (from, source.len()), codes.len(), scales.len())?;
    let sizes = (columns.max(1), scheme.group_of(columns));
    let done = match (from, scheme.code) {
        (Float::Bf16, Code::Int8) => widest!(shrink::<Bf16, Int8, 2>(scheme.scale, sizes, source, codes, scales)),
        (Float::F16, Code::Int8) => widest!(shrink::<F16, Int8, 2>(scheme.scale, sizes, source, codes, scales)),
        (Float::F32, Code::Int8) => widest!(shrink::<F32, Int8, 4>(scheme.scale, sizes, source, codes, scales)),
        (Float::Bf16, Code::F8E4m3) => widest!(shrink::<Bf16, E4m3, 2>(scheme.scale, sizes, source, codes, scales)),
        (Float::F16, Code::F8E4m3) => widest!(shrink::<F16, E4m3, 2>(scheme.scale, sizes, source, codes, scales)),
        (Float::F32, Code::F8E4m3) => widest!(shrink::<F32, E4m3, 4>(scheme.scale, sizes, source, codes, scales)),
    };
    done.map_err(|row| {
        let scale = scheme.scale;
        Error::invalid(format!(
            "row {row} has an element that is infinite or no number, or needs a scale that {scale:?} has not: leave this \
             tensor as it is, or choose fp32 scales"
        ))
    })
}

/// Gives back what was quantised, into `target`.
///
/// # Errors
///
/// [`Error::Invalid`] where slices do not fit each other.
pub fn dequantise(
    scheme: Scheme,
    columns: usize,
    codes: &[u8],
    scales: &[u8],
    (to, target): (Float, &mut [u8]),
) -> Result<()> {
    scheme.check(columns, (to, target.len()), codes.len(), scales.len())?;
    let sizes = (columns.max(1), scheme.group_of(columns));
    match (to, scheme.code) {
        (Float::Bf16, Code::Int8) => widest!(grow::<Bf16, Int8, 2>(scheme.scale, sizes, codes, scales, target)),
        (Float::F16, Code::Int8) => widest!(grow::<F16, Int8, 2>(scheme.scale, sizes, codes, scales, target)),
        (Float::F32, Code::Int8) => widest!(grow::<F32, Int8, 4>(scheme.scale, sizes, codes, scales, target)),
        (Float::Bf16, Code::F8E4m3) => widest!(grow::<Bf16, E4m3, 2>(scheme.scale, sizes, codes, scales, target)),
        (Float::F16, Code::F8E4m3) => widest!(grow::<F16, E4m3, 2>(scheme.scale, sizes, codes, scales, target)),
        (Float::F32, Code::F8E4m3) => widest!(grow::<F32, E4m3, 4>(scheme.scale, sizes, codes, scales, target)),
    }
    Ok(())
}

/// All groups to codes; the row of the first that cannot be.
#[inline(always)]
fn shrink<E: Element<N>, C: Coded, const N: usize>(
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
            // As bits, numbers without a sign have the order of numbers, with infinity and then NaNs above them.
            let most = elements.iter().map(|bytes| E::widen(*bytes) & 0x7fff_ffff).fold(0, u32::max);
            let scale = scales.next().map_or(0, |bytes| put(scale_float, f32::from_bits(most) / C::MOST, bytes));
            if most >= INFINITY || scale >= INFINITY {
                return Err(row);
            }
            let scale = f32::from_bits(scale);
            if scale == 0.0 {
                codes.fill(0);
                continue;
            }
            for (code, bytes) in codes.iter_mut().zip(elements) {
                let value = f32::from_bits(E::widen(*bytes)) / scale;
                *code = C::encode(value.clamp(-C::MOST, C::MOST));
            }
        }
    }
    Ok(())
}

/// All groups to elements.
#[inline(always)]
fn grow<E: Element<N>, C: Coded, const N: usize>(
    scale_float: Float,
    (columns, group): (usize, usize),
    codes: &[u8],
    scales: &[u8],
    target: &mut [u8],
) {
    let mut scales = scales.chunks_exact(scale_float.bytes());
    for (elements, codes) in target.as_chunks_mut::<N>().0.chunks_mut(columns).zip(codes.chunks(columns)) {
        for (elements, codes) in elements.chunks_mut(group).zip(codes.chunks(group)) {
            let scale = scales.next().map_or(0.0, |bytes| get(scale_float, bytes));
            for (element, code) in elements.iter_mut().zip(codes) {
                *element = E::narrow((C::decode(*code) * scale).to_bits());
            }
        }
    }
}

/// Writes a scale, and returns what was written as the bits of an fp32: that is what codes are made with.
#[inline(always)]
fn put(float: Float, scale: f32, bytes: &mut [u8]) -> u32 {
    match float {
        Float::Bf16 => {
            let short = Bf16::narrow(scale.to_bits());
            bytes.copy_from_slice(&short);
            Bf16::widen(short)
        }
        Float::F16 => {
            let short = F16::narrow(scale.to_bits());
            bytes.copy_from_slice(&short);
            F16::widen(short)
        }
        Float::F32 => {
            bytes.copy_from_slice(&scale.to_le_bytes());
            scale.to_bits()
        }
    }
}

/// Reads a scale.
#[inline(always)]
fn get(float: Float, bytes: &[u8]) -> f32 {
    let bits = match float {
        Float::Bf16 => bytes.first_chunk().map(|bytes| Bf16::widen(*bytes)),
        Float::F16 => bytes.first_chunk().map(|bytes| F16::widen(*bytes)),
        Float::F32 => bytes.first_chunk().map(|bytes| F32::widen(*bytes)),
    };
    f32::from_bits(bits.unwrap_or(0))
}
