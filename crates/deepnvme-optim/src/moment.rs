//! State that lies in memory as fp32, as bf16, or as a byte for each element and a scale for each block.
//!
//! A byte is a float without some of its bits. The number that it stands for has eight neighbours in each octave, all
//! with the upper twelve bits of an fp32; a block's scale is the smallest such number that no element exceeds, and a code
//! counts down from there:
//!
//! | moment | code | octaves below the scale | zero |
//! |---|---|---|---|
//! | [`Sign::Unsigned`], of squares | 255 is the scale, 254 the number before it, ... | 32 | none, unless the block is all zeros |
//! | [`Sign::Signed`], of gradients | the sign, then 127 is the scale's size, ... | 16 | 0 |
//!
//! Why so:
//!
//! - **Steps that grow with the number.** Adam divides by roots of second moments, so that what counts is how far off
//!   they are relative to themselves. Squares of gradients in one block span many octaves, which equal steps would make
//!   zeros of. Against a table of codes (Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization") this has
//!   the advantage that both ways are shifts and additions: no search, no table, as fast as memory.
//! - **No zero among squares.** A second moment that becomes zero makes a huge step of a small first one. What is below the
//!   smallest number is raised to it, which makes steps smaller.
//! - **Rounded at random.** A second moment changes by a thousandth in a step (with a beta of 0.999), and codes lie a tenth
//!   apart: rounded to the nearest they would stay where they are for ever. At random they move as often as they should,
//!   and their mean is right; numbers that do not change stay exactly where they are. bf16 needs that as well.
//! - **Blocks of 128.** An outlier, or an infinity, spoils no more than its block. The scale costs 3% of the bytes.
//!
//! Codes and scales are two slices, so that state can be cut at every block. Zeros mean zeros: new state is zeroed memory.

use crate::error::{Error, Result};
use crate::float::{Bf16, INFINITY, SIZE, Short};
use crate::{BLOCK, TILE};

/// What a moment can be.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Sign {
    /// Means of gradients.
    Signed,
    /// Means or sums of squares.
    Unsigned,
}

/// A moment of some elements.
#[derive(Debug)]
pub enum MomentMut<'a> {
    /// As it is.
    F32(&'a mut [f32]),
    /// Rounded at random.
    Bf16(&'a mut [u16]),
    /// A byte for each element, a scale for each block of [`BLOCK`], the last of which may be shorter.
    Q8 {
        /// As many as elements.
        codes: &'a mut [u8],
        /// One for each block.
        scales: &'a mut [f32],
    },
}

/// Bits of an fp32 that codes do without.
const DROPPED: u32 = 20;
/// The grid's place of infinity.
const GRID_INFINITY: u32 = INFINITY >> DROPPED;

impl<'a> MomentMut<'a> {
    /// Elements.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
            Self::Q8 { codes, .. } => codes.len(),
        }
    }

    /// Whether there are none.
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
            Self::Q8 { scales, .. } if scales.len() != elements.div_ceil(BLOCK) => {
                let (len, wanted) = (scales.len(), elements.div_ceil(BLOCK));
                Err(Error::invalid(format!("{name} has {len} scales; {elements} elements need {wanted}")))
            }
            _ => Ok(()),
        }
    }

    /// Two parts; `at` is a multiple of [`BLOCK`], or the end.
    pub(crate) fn split_at(self, at: usize) -> (Self, Self) {
        match self {
            Self::F32(values) => {
                let (head, tail) = values.split_at_mut(at);
                (Self::F32(head), Self::F32(tail))
            }
            Self::Bf16(values) => {
                let (head, tail) = values.split_at_mut(at);
                (Self::Bf16(head), Self::Bf16(tail))
            }
            Self::Q8 { codes, scales } => {
                let (codes, scales) = (codes.split_at_mut(at), scales.split_at_mut(at.div_ceil(BLOCK)));
                (Self::Q8 { codes: codes.0, scales: scales.0 }, Self::Q8 { codes: codes.1, scales: scales.1 })
            }
        }
    }

    /// Needs noise to be written.
    pub(crate) fn is_rounded(&self) -> bool {
        !matches!(self, Self::F32(_))
    }

    /// The tile that begins at `at`: the memory itself where it can be, else a copy in the buffer.
    #[inline(always)]
    pub(crate) fn tile<'b>(&'b mut self, sign: Sign, at: usize, buffer: &'b mut [f32; TILE]) -> &'b mut [f32; TILE] {
        match self {
            Self::F32(values) => return crate::numbers::direct(values, at, buffer),
            Self::Bf16(values) => crate::numbers::widen::<Bf16>(&values[at..], buffer),
            Self::Q8 { codes, scales } => decode(sign, &codes[at..], scales[at / BLOCK], buffer),
        }
        buffer
    }

    /// Writes a tile back that lies in a buffer.
    #[inline(always)]
    pub(crate) fn store(&mut self, sign: Sign, at: usize, tile: &[f32; TILE], noise: &[u32; TILE]) {
        match self {
            Self::F32(values) => crate::numbers::put_back(values, at, tile),
            Self::Bf16(values) => {
                for ((target, value), noise) in values[at..].iter_mut().zip(tile).zip(noise) {
                    *target = Bf16::stochastic(*value, halves(sign, *noise));
                }
            }
            Self::Q8 { codes, scales } => scales[at / BLOCK] = encode(sign, tile, noise, &mut codes[at..]),
        }
    }
}

/// The two moments of an element have a half of its noise each.
#[inline(always)]
fn halves(sign: Sign, noise: u32) -> u32 {
    match sign {
        Sign::Signed => noise & 0xffff,
        Sign::Unsigned => noise >> 16,
    }
}

/// The grid's place of code zero.
#[inline(always)]
fn base(sign: Sign, top: u32) -> u32 {
    top.saturating_sub(match sign {
        Sign::Signed => 127,
        Sign::Unsigned => 255,
    })
}

#[inline(always)]
fn decode(sign: Sign, codes: &[u8], scale: f32, out: &mut [f32; TILE]) {
    let base = base(sign, (scale.to_bits() & SIZE) >> DROPPED);
    match sign {
        Sign::Unsigned => {
            for (out, code) in out.iter_mut().zip(codes) {
                *out = f32::from_bits((u32::from(*code) + base) << DROPPED);
            }
        }
        Sign::Signed => {
            for (out, code) in out.iter_mut().zip(codes) {
                let (sign, size) = (u32::from(*code & 0x80) << 24, u32::from(*code & 0x7f));
                *out = f32::from_bits(sign | if size == 0 { 0 } else { (size + base) << DROPPED });
            }
        }
    }
    out.iter_mut().skip(codes.len()).for_each(|out| *out = 0.0);
}

/// Writes as many codes as there are elements left; the scale.
#[inline(always)]
fn encode(sign: Sign, tile: &[f32; TILE], noise: &[u32; TILE], codes: &mut [u8]) -> f32 {
    let count = codes.len().min(TILE);
    // As bits, numbers without a sign have the order of numbers, with infinity and then NaNs above them.
    let most = tile[..count].iter().fold(0, |most: u32, value| most.max(value.to_bits() & SIZE));
    let top = match most {
        INFINITY => GRID_INFINITY,
        0..INFINITY => ((most + ((1 << DROPPED) - 1)) >> DROPPED).min(GRID_INFINITY - 1),
        _ => GRID_INFINITY + 4, // a quiet NaN
    };
    let base = base(sign, top);
    let dither = |noise: u32| halves(sign, noise) << (DROPPED - 16) | 1 << (DROPPED - 17);
    match sign {
        Sign::Unsigned => {
            for ((code, value), noise) in codes.iter_mut().zip(tile).zip(noise) {
                let size = value.to_bits() & SIZE;
                let place = if size > INFINITY { top } else { (size + dither(*noise)) >> DROPPED };
                *code = (place.clamp(base, top) - base) as u8;
            }
        }
        Sign::Signed => {
            let floor = f32::from_bits((base + 1) << DROPPED);
            for ((code, value), noise) in codes.iter_mut().zip(tile).zip(noise) {
                let size = value.to_bits() & SIZE;
                let place = if size > INFINITY { top } else { (size + dither(*noise)) >> DROPPED };
                // Between zero and the smallest number.
                let chance = (halves(sign, *noise) as i32 as f32 + 0.5) * f32::from_bits((127 - 16) << 23);
                let below = u32::from(f32::from_bits(size) > chance * floor);
                let above = place.clamp(base, top) - base;
                let count = if size < floor.to_bits() { below } else { above };
                *code = (value.to_bits() >> 24 & 0x80 | count) as u8;
            }
        }
    }
    f32::from_bits(top << DROPPED)
}

#[cfg(test)]
#[path = "moment_tests.rs"]
mod tests;
