//! Casts between bf16, fp16 and fp32, over bytes of any alignment.
//!
//! Numbers are rounded to nearest, ties to even. The results equal torch's `.to(dtype)` bit for bit, including
//! subnormals, infinities and overflow. A NaN stays a NaN. torch has no rule for its payload (it depends on the
//! CPU and on the position in the tensor); here it is one of torch's results:
//!
//! | from | to | NaN |
//! |---|---|---|
//! | bf16 | fp32 | unchanged, shifted left |
//! | fp16 | fp32 | sign and payload kept, made quiet |
//! | fp32 | fp16 | sign and upper payload kept, made quiet |
//! | fp32 | bf16 | 0x7fc0 |
//!
//! A cast between bf16 and fp16 goes through fp32. That rounds only once, since fp32 represents both exactly.

use crate::half::{Bf16, F16, Half};
use crate::{Error, Float, Result, vectorise};

/// Casts all elements of `source` into `target`.
///
/// # Errors
///
/// [`Error::Invalid`] if `source` ends within an element, or `target` has another number of elements.
pub fn convert(from: Float, to: Float, source: &[u8], target: &mut [u8]) -> Result<()> {
    let elements = source.len() / from.bytes();
    if !source.len().is_multiple_of(from.bytes()) || target.len() != elements * to.bytes() {
        let (source, target) = (source.len(), target.len());
        return Err(Error::invalid(format!(
            "{source} bytes of {from:?} cannot be cast to {target} bytes of {to:?}: pass whole elements, equally many on both sides"
        )));
    }
    match (from, to) {
        _ if from == to => target.copy_from_slice(source),
        (Float::Bf16, Float::F32) => vectorise!(convert_all::<Bf16, F32, 2, 4>(source, target)),
        (Float::F16, Float::F32) => vectorise!(convert_all::<F16, F32, 2, 4>(source, target)),
        (Float::F32, Float::Bf16) => vectorise!(convert_all::<F32, Bf16, 4, 2>(source, target)),
        (Float::F32, Float::F16) => vectorise!(convert_all::<F32, F16, 4, 2>(source, target)),
        (Float::Bf16, _) => vectorise!(convert_all::<Bf16, F16, 2, 2>(source, target)),
        (_, _) => vectorise!(convert_all::<F16, Bf16, 2, 2>(source, target)),
    }
    Ok(())
}

#[inline(always)]
fn convert_all<A: Element<N>, B: Element<M>, const N: usize, const M: usize>(source: &[u8], target: &mut [u8]) {
    for (target, source) in target.as_chunks_mut().0.iter_mut().zip(source.as_chunks().0) {
        *target = B::narrow(A::widen(*source));
    }
}

/// A float type, converted through the bits of an fp32.
pub(crate) trait Element<const N: usize> {
    /// Converts to the bits of an fp32, exactly.
    fn widen(bytes: [u8; N]) -> u32;
    /// Rounds an fp32 to the nearest number.
    fn narrow(bits: u32) -> [u8; N];
}

/// [`Float::F32`].
pub(crate) struct F32;

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

impl<H: Half> Element<2> for H {
    #[inline(always)]
    fn widen(bytes: [u8; 2]) -> u32 {
        H::widen(u16::from_le_bytes(bytes))
    }

    #[inline(always)]
    fn narrow(bits: u32) -> [u8; 2] {
        H::narrow(bits).to_le_bytes()
    }
}
