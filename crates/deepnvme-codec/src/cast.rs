//! bf16, fp16 and fp32 to each other, over bytes of any alignment.
//!
//! Numbers are rounded to the nearest, and to the even one of two that are as near: bit for bit what torch's `.to(dtype)`
//! gives, subnormals, infinities and overflow included. A NaN stays a NaN. Which one, torch has no rule for (its answer
//! depends on the processor and on the place in the tensor), so here it is one of the answers that torch gives:
//!
//! | from | to | NaN |
//! |---|---|---|
//! | bf16 | fp32 | as it is, moved up |
//! | fp16 | fp32 | sign and payload kept, made quiet |
//! | fp32 | fp16 | sign and the upper payload kept, made quiet |
//! | fp32 | bf16 | 0x7fc0 |
//!
//! Between the two short types the way leads over fp32, which rounds only once, since it holds both exactly.

use crate::{Error, Float, Result, widest};

/// Converts all elements of `from` into `to`.
///
/// # Errors
///
/// [`Error::Invalid`] where `source` has a part of an element, or `target` not as many elements.
pub fn convert(from: Float, to: Float, source: &[u8], target: &mut [u8]) -> Result<()> {
    let elements = source.len() / from.bytes();
    if !source.len().is_multiple_of(from.bytes()) || target.len() != elements * to.bytes() {
        let (source, target) = (source.len(), target.len());
        return Err(Error::invalid(format!(
            "{source} bytes of {from:?} do not become {target} bytes of {to:?}: whole elements, as many there as here"
        )));
    }
    match (from, to) {
        _ if from == to => target.copy_from_slice(source),
        (Float::Bf16, Float::F32) => widest!(each::<Bf16, F32, 2, 4>(source, target)),
        (Float::F16, Float::F32) => widest!(each::<F16, F32, 2, 4>(source, target)),
        (Float::F32, Float::Bf16) => widest!(each::<F32, Bf16, 4, 2>(source, target)),
        (Float::F32, Float::F16) => widest!(each::<F32, F16, 4, 2>(source, target)),
        (Float::Bf16, _) => widest!(each::<Bf16, F16, 2, 2>(source, target)),
        (_, _) => widest!(each::<F16, Bf16, 2, 2>(source, target)),
    }
    Ok(())
}

#[inline(always)]
fn each<A: Element<N>, B: Element<M>, const N: usize, const M: usize>(source: &[u8], target: &mut [u8]) {
    for (target, source) in target.as_chunks_mut().0.iter_mut().zip(source.as_chunks().0) {
        *target = B::narrow(A::widen(*source));
    }
}

/// A type by way of the bits of an fp32, so that NaNs are bits, too. Without branches, so that loops become vectors, and
/// without arithmetic on subnormals, so that it does not matter whether the thread flushes them.
pub(crate) trait Element<const N: usize> {
    /// The fp32 that is the same number.
    fn widen(bytes: [u8; N]) -> u32;
    /// The nearest number to an fp32.
    fn narrow(bits: u32) -> [u8; N];
}

/// [`Float::Bf16`].
pub(crate) struct Bf16;
/// [`Float::F16`].
pub(crate) struct F16;
/// [`Float::F32`].
pub(crate) struct F32;

/// fp32's infinity; what is above, sign aside, is a NaN.
pub(crate) const INFINITY: u32 = 0x7f80_0000;
/// What distinguishes the exponents of fp16 and fp32, in place.
const BIAS: u32 = (127 - 15) << 23;

impl Element<4> for F32 {
    #[inline(always)]
    fn widen(bytes: [u8; 4]) -> u32 {
        u32::from_le_bytes(bytes)
    }

    #[inline(always)]
    fn narrow(bits: u32) -> [u8; 4] {
        bits.to_le_bytes()
    }
}

impl Element<2> for Bf16 {
    #[inline(always)]
    fn widen(bytes: [u8; 2]) -> u32 {
        u32::from(u16::from_le_bytes(bytes)) << 16
    }

    #[inline(always)]
    fn narrow(bits: u32) -> [u8; 2] {
        // Half of a unit of the shorter number, and a little less where that is even already.
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let nan = bits & 0x7fff_ffff > INFINITY;
        (if nan { 0x7fc0 } else { rounded as u16 }).to_le_bytes()
    }
}

impl Element<2> for F16 {
    #[inline(always)]
    fn widen(bytes: [u8; 2]) -> u32 {
        let bits = u32::from(u16::from_le_bytes(bytes));
        let (sign, size) = ((bits & 0x8000) << 16, bits & 0x7fff);
        let normal = (size << 13) + BIAS;
        // A subnormal is a count of the smallest number.
        let subnormal = (size as i32 as f32 * f32::from_bits((127 - 24) << 23)).to_bits();
        let quiet = if size > 0x7c00 { 0x40_0000 } else { 0 };
        let large = (normal + BIAS) | quiet;
        sign | if size < 0x400 {
            subnormal
        } else if size < 0x7c00 {
            normal
        } else {
            large
        }
    }

    #[inline(always)]
    fn narrow(bits: u32) -> [u8; 2] {
        let (sign, size) = (bits >> 16 & 0x8000, bits & 0x7fff_ffff);
        let normal = size.wrapping_sub(BIAS).wrapping_add(0xfff + (size >> 13 & 1)) >> 13;
        // One half has as its last bit the smallest number of fp16: the addition rounds to it.
        let subnormal = (f32::from_bits(size) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
        let nan = 0x7e00 | size >> 13 & 0x3ff;
        let small = if size < 0x3880_0000 { subnormal } else { normal };
        // From 65520 on the nearest number is infinity.
        let large = if size > INFINITY { nan } else { 0x7c00 };
        ((sign | if size < 0x477f_f000 { small } else { large }) as u16).to_le_bytes()
    }
}
