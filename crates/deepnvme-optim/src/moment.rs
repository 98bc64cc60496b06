//! Optimizer state in memory: fp32, bf16, or 8-bit codes with a scale for each block.
//!
//! An 8-bit element is a float with three mantissa bits, scaled by its block's maximum and rounded stochastically. The
//! values that codes represent have the upper twelve bits of an fp32, eight per octave. A block's scale is the smallest
//! such value that no element exceeds, and codes count down from it:
//!
//! | moment | code | octaves below the scale | zero |
//! |---|---|---|---|
//! | [`Sign::Unsigned`], squares | 255 is the scale, 254 the value below it, ... | 32 | none for scales from 2^-95 |
//! | [`Sign::Signed`], gradients | the sign, then 127 is the magnitude of the scale, ... | 16 | 0 |
//!
//! - **Exponential steps.** Adam divides by roots of second moments, so their relative error matters. Squares of
//!   gradients in one block span many octaves, most of which uniform steps would round to zero. Compared to a code
//!   table (Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization"), both directions are shifts and
//!   additions: no search and no table, at memory speed.
//! - **No zero among squares.** A second moment of zero turns a small first moment into a huge step. Values below the
//!   smallest one are raised to it, which makes steps smaller.
//! - **Stochastic rounding.** A second moment changes by a thousandth per step (with a beta of 0.999), and codes are a
//!   tenth apart: rounded to nearest, they would never change. Stochastically they change with the right frequency and
//!   keep the right mean, and values that a code represents exactly do not change. bf16 needs this as well.
//! - **Blocks of 128.** An outlier or an infinity affects only its block. The scale costs 3% of the bytes.
//!
//! Codes and scales are two slices, so that state can be split at every block. Zeros represent zeros: new state is
//! zeroed memory.

use crate::error::{Error, Result};
use crate::float_slice::{split_slice, store_tile, tile_in_place, widen};
use deepnvme_codec::half::{Bf16, F32_INFINITY, F32_MAGNITUDE, Half};

use crate::{SCALE_ELEMENTS, TILE};

/// Whether the elements of a moment can be negative.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Sign {
    /// Means of gradients, of either sign.
    Signed,
    /// Means or sums of squares, never negative.
    Unsigned,
}

/// A moment, writable.
#[derive(Debug)]
pub enum MomentMut<'a> {
    /// Not rounded.
    F32(&'a mut [f32]),
    /// Rounded stochastically.
    Bf16(&'a mut [u16]),
    /// 8-bit codes, with a scale for each block of [`SCALE_ELEMENTS`] elements. The last block may be shorter.
    Q8 {
        /// One per element.
        codes: &'a mut [u8],
        /// One per block.
        scales: &'a mut [f32],
    },
}

/// Bits of an fp32 that codes drop.
const DROPPED: u32 = 20;
/// Infinity, in units of the grid of values.
const GRID_INFINITY: u32 = F32_INFINITY >> DROPPED;
/// A quiet NaN, in the same units.
const GRID_NAN: u32 = GRID_INFINITY + 4;
/// The largest code of squares, which is also the number of codes besides zero.
const UNSIGNED_CODE_MAX: u32 = 255;
/// The largest magnitude of codes with a sign, which is also the number of magnitudes besides zero.
const SIGNED_CODE_MAX: u32 = 127;
const CODE_SIGN: u32 = 0x80;
/// Shift from the sign of a code to the sign of an fp32.
const SIGN_SHIFT: u32 = 24;
/// Bits of noise for one moment of an element.
const NOISE_BITS: u32 = 16;
/// 2 to the power of `-NOISE_BITS`, as the bits of an fp32.
const NOISE_UNIT: u32 = (127 - NOISE_BITS) << 23;

impl<'a> MomentMut<'a> {
    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
            Self::Q8 { codes, .. } => codes.len(),
        }
    }

    /// Whether the moment is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn check(&self, name: &str, elements: usize) -> Result<()> {
        if self.len() != elements {
            let len = self.len();
            return Err(Error::invalid(format!("{name} has {len} elements; the weights have {elements}")));
        }
        match self {
            Self::Q8 { scales, .. } if scales.len() != elements.div_ceil(SCALE_ELEMENTS) => {
                let (len, wanted) = (scales.len(), elements.div_ceil(SCALE_ELEMENTS));
                Err(Error::invalid(format!("{name} has {len} scales; {elements} elements need {wanted}")))
            }
            _ => Ok(()),
        }
    }

    /// Splits at `at`, a multiple of [`SCALE_ELEMENTS`] or the end.
    pub(crate) fn split_at(self, at: usize) -> (Self, Self) {
        match self {
            Self::F32(values) => split_slice(values, at, Self::F32),
            Self::Bf16(values) => split_slice(values, at, Self::Bf16),
            Self::Q8 { codes, scales } => {
                let (codes, scales) = (codes.split_at_mut(at), scales.split_at_mut(at.div_ceil(SCALE_ELEMENTS)));
                (Self::Q8 { codes: codes.0, scales: scales.0 }, Self::Q8 { codes: codes.1, scales: scales.1 })
            }
        }
    }

    /// Whether storing needs noise.
    pub(crate) fn is_rounded(&self) -> bool {
        !matches!(self, Self::F32(_))
    }

    /// Returns the tile at `at`: the memory itself for a whole tile of fp32, else a copy in the buffer.
    #[inline(always)]
    pub(crate) fn tile<'b>(&'b mut self, sign: Sign, at: usize, buffer: &'b mut [f32; TILE]) -> &'b mut [f32; TILE] {
        match self {
            Self::F32(values) => return tile_in_place(values, at, buffer),
            Self::Bf16(values) => widen::<Bf16>(&values[at..], buffer),
            Self::Q8 { codes, scales } => decode(sign, &codes[at..], scales[at / SCALE_ELEMENTS], buffer),
        }
        buffer
    }

    /// Stores a tile from a buffer.
    #[inline(always)]
    pub(crate) fn store(&mut self, sign: Sign, at: usize, tile: &[f32; TILE], noise: &[u32; TILE]) {
        match self {
            Self::F32(values) => store_tile(values, at, tile),
            Self::Bf16(values) => {
                for ((target, value), noise) in values[at..].iter_mut().zip(tile).zip(noise) {
                    *target = Bf16::narrow_stochastic(value.to_bits(), halves(sign, *noise));
                }
            }
            Self::Q8 { codes, scales } => scales[at / SCALE_ELEMENTS] = encode(sign, tile, noise, &mut codes[at..]),
        }
    }
}

/// Signed and unsigned moments of an element use different halves of its noise.
#[inline(always)]
fn halves(sign: Sign, noise: u32) -> u32 {
    match sign {
        Sign::Signed => noise & ((1 << NOISE_BITS) - 1),
        Sign::Unsigned => noise >> NOISE_BITS,
    }
}

/// Returns the value from which codes count up, in units of the grid.
#[inline(always)]
fn base(sign: Sign, top: u32) -> u32 {
    top.saturating_sub(match sign {
        Sign::Signed => SIGNED_CODE_MAX,
        Sign::Unsigned => UNSIGNED_CODE_MAX,
    })
}

#[inline(always)]
fn decode(sign: Sign, codes: &[u8], scale: f32, out: &mut [f32; TILE]) {
    let base = base(sign, (scale.to_bits() & F32_MAGNITUDE) >> DROPPED);
    match sign {
        Sign::Unsigned => {
            for (out, code) in out.iter_mut().zip(codes) {
                *out = f32::from_bits((u32::from(*code) + base) << DROPPED);
            }
        }
        Sign::Signed => {
            for (out, code) in out.iter_mut().zip(codes) {
                let (sign, size) = ((u32::from(*code) & CODE_SIGN) << SIGN_SHIFT, u32::from(*code) & SIGNED_CODE_MAX);
                *out = f32::from_bits(sign | if size == 0 { 0 } else { (size + base) << DROPPED });
            }
        }
    }
    out.iter_mut().skip(codes.len()).for_each(|out| *out = 0.0);
}

/// Writes the codes of the elements that are left. Returns the scale.
#[inline(always)]
fn encode(sign: Sign, tile: &[f32; TILE], noise: &[u32; TILE], codes: &mut [u8]) -> f32 {
    let count = codes.len().min(TILE);
    // The bits of non-negative floats order like the numbers, with infinity and then NaNs above them.
    let most = tile[..count].iter().fold(0, |most: u32, value| most.max(value.to_bits() & F32_MAGNITUDE));
    let top = match most {
        F32_INFINITY => GRID_INFINITY,
        0..F32_INFINITY => ((most + ((1 << DROPPED) - 1)) >> DROPPED).min(GRID_INFINITY - 1),
        _ => GRID_NAN,
    };
    let base = base(sign, top);
    let dither = |noise: u32| halves(sign, noise) << (DROPPED - NOISE_BITS) | 1 << (DROPPED - NOISE_BITS - 1);
    match sign {
        Sign::Unsigned => {
            for ((code, value), noise) in codes.iter_mut().zip(tile).zip(noise) {
                let size = value.to_bits() & F32_MAGNITUDE;
                let place = if size > F32_INFINITY { top } else { (size + dither(*noise)) >> DROPPED };
                *code = (place.clamp(base, top) - base) as u8;
            }
        }
        Sign::Signed => {
            let floor = f32::from_bits((base + 1) << DROPPED);
            for ((code, value), noise) in codes.iter_mut().zip(tile).zip(noise) {
                let size = value.to_bits() & F32_MAGNITUDE;
                let place = if size > F32_INFINITY { top } else { (size + dither(*noise)) >> DROPPED };
                // Between zero and the smallest value.
                let chance = (halves(sign, *noise) as i32 as f32 + 0.5) * f32::from_bits(NOISE_UNIT);
                let below = u32::from(f32::from_bits(size) > chance * floor);
                let above = place.clamp(base, top) - base;
                let count = if size < floor.to_bits() { below } else { above };
                *code = (value.to_bits() >> SIGN_SHIFT & CODE_SIGN | count) as u8;
            }
        }
    }
    f32::from_bits(top << DROPPED)
}

#[cfg(test)]
#[path = "moment_tests.rs"]
mod tests;
