//! Conversions between the 16-bit floats and fp32.
//!
//! They take and return the bits of an fp32, since an `f32` need not keep the bits of a NaN. They have no branches, so
//! that loops over them are vectorised. A thread's flush-to-zero mode does not change their results: bf16 takes integer
//! arithmetic only, and fp16 rounds every subnormal fp32 away.

/// A 16-bit float format.
pub trait Half {
    /// Converts to fp32, exactly. A NaN becomes quiet, or stays as it is if the format only shifts.
    fn widen(half: u16) -> u32;
    /// Rounds an fp32 to the nearest number, ties to even. Numbers that are too large become infinity, and a NaN stays
    /// one.
    fn narrow(bits: u32) -> u16;
    /// Rounds an fp32 up or down at random, so that the expected value is the fp32 within the format's range. For
    /// subnormals of fp16, it is the fp32 to within 2^-13 of the smallest number. Uses at most the lower 16 bits of
    /// `noise`.
    fn narrow_stochastic(bits: u32, noise: u32) -> u16;
}

/// [`Float::Bf16`](crate::Float::Bf16).
#[derive(Clone, Copy, Debug)]
pub struct Bf16;
/// [`Float::F16`](crate::Float::F16).
#[derive(Clone, Copy, Debug)]
pub struct F16;

/// The bits of fp32's infinity. Larger magnitudes are NaNs.
pub const F32_INFINITY: u32 = 0x7f80_0000;
/// All bits of an fp32 but the sign.
pub const F32_MAGNITUDE: u32 = 0x7fff_ffff;
/// The quiet NaN of bf16.
const BF16_NAN: u32 = 0x7fc0;
/// The difference of the exponent biases of fp32 and fp16, in place.
const F16_BIAS: u32 = (127 - 15) << 23;
/// The smallest normal number of fp16, as fp32.
const F16_NORMAL_MIN: u32 = 0x3880_0000;

impl Half for Bf16 {
    #[inline(always)]
    fn widen(half: u16) -> u32 {
        u32::from(half) << 16
    }

    #[inline(always)]
    fn narrow(bits: u32) -> u16 {
        // Add half a unit of the shorter number, minus one bit if the shorter number is even: ties go to even.
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        (if bits & F32_MAGNITUDE > F32_INFINITY { BF16_NAN } else { rounded }) as u16
    }

    #[inline(always)]
    fn narrow_stochastic(bits: u32, noise: u32) -> u16 {
        let rounded = bits.wrapping_add(noise & 0xffff) >> 16;
        let special = if bits & F32_MAGNITUDE > F32_INFINITY { BF16_NAN } else { bits >> 16 };
        (if bits & F32_MAGNITUDE >= F32_INFINITY { special } else { rounded }) as u16
    }
}

impl Half for F16 {
    #[inline(always)]
    fn widen(half: u16) -> u32 {
        let bits = u32::from(half);
        let (sign, magnitude) = ((bits & 0x8000) << 16, bits & 0x7fff);
        let normal = (magnitude << 13) + F16_BIAS;
        // A subnormal is a multiple of the smallest number.
        let subnormal = (magnitude as i32 as f32 * f32::from_bits((127 - 24) << 23)).to_bits();
        let quiet = if magnitude > 0x7c00 { 0x40_0000 } else { 0 };
        let large = (normal + F16_BIAS) | quiet;
        sign | if magnitude < 0x400 {
            subnormal
        } else if magnitude < 0x7c00 {
            normal
        } else {
            large
        }
    }

    #[inline(always)]
    fn narrow(bits: u32) -> u16 {
        let (sign, magnitude) = (bits >> 16 & 0x8000, bits & F32_MAGNITUDE);
        let normal = magnitude.wrapping_sub(F16_BIAS).wrapping_add(0xfff + (magnitude >> 13 & 1)) >> 13;
        // The last bit of one half is the smallest number of fp16, so the addition rounds to it.
        let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
        let nan = 0x7e00 | magnitude >> 13 & 0x3ff;
        let small = if magnitude < F16_NORMAL_MIN { subnormal } else { normal };
        // From 65520 on the nearest number is infinity.
        let large = if magnitude > F32_INFINITY { nan } else { 0x7c00 };
        (sign | if magnitude < 0x477f_f000 { small } else { large }) as u16
    }

    #[inline(always)]
    fn narrow_stochastic(bits: u32, noise: u32) -> u16 {
        let (sign, magnitude) = (bits >> 16 & 0x8000, bits & F32_MAGNITUDE);
        let normal = magnitude.wrapping_sub(F16_BIAS).wrapping_add(noise & 0x1fff) >> 13;
        // A subnormal is a multiple of the smallest number plus a fraction. The noise is added before truncation.
        let fraction = (noise & 0x1fff) as i32 as f32 * f32::from_bits((127 - 13) << 23);
        let multiple = f32::from_bits(magnitude.min(F16_NORMAL_MIN)) * f32::from_bits((127 + 24) << 23) + fraction;
        let small = if magnitude < F16_NORMAL_MIN { multiple as i32 as u32 } else { normal };
        let large = if magnitude > F32_INFINITY { 0x7e00 } else { 0x7c00 };
        // From 65536 on there is no larger number to round to.
        (sign | if magnitude < 0x4780_0000 { small } else { large }) as u16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn widen<H: Half>(half: u16) -> f32 {
        f32::from_bits(H::widen(half))
    }

    fn nearest<H: Half>(value: f32) -> u16 {
        H::narrow(value.to_bits())
    }

    fn stochastic<H: Half>(value: f32, noise: u32) -> u16 {
        H::narrow_stochastic(value.to_bits(), noise)
    }

    fn check<H: Half>(name: &str) {
        for short in 0..=u16::MAX {
            let wide = widen::<H>(short);
            if wide.is_nan() {
                assert!(widen::<H>(nearest::<H>(wide)).is_nan() && widen::<H>(stochastic::<H>(wide, 0xffff)).is_nan());
                continue;
            }
            assert_eq!(nearest::<H>(wide), short, "{name}");
            for noise in [0, 1, 0x1fff, 0x8000, 0xffff_ffff] {
                assert_eq!(stochastic::<H>(wide, noise), short, "{name}: exact values are kept, {wide:e}");
            }
        }
    }

    #[test]
    fn every_half_round_trips() {
        check::<Bf16>("bf16");
        check::<F16>("fp16");
    }

    /// At every sixteenth between two neighbours, over all noise, the share that rounds up equals the fraction.
    fn check_mean<H: Half>(short: u16) {
        let (low, high) = (widen::<H>(short), widen::<H>(short + 1));
        for part in 0..16 {
            let value = low + (high - low) * (part as f32 / 16.0);
            let up = (0..0x1_0000_u32).filter(|noise| stochastic::<H>(value, *noise) != short).count();
            assert_eq!(up, part * 0x1000, "{short:x}, {part}/16");
            assert!((0..64).all(|noise| [short, short + 1].contains(&stochastic::<H>(value, noise * 1023))));
            let expected = if part < 8 || (part == 8 && short.is_multiple_of(2)) { short } else { short + 1 };
            assert_eq!(nearest::<H>(value), expected);
        }
    }

    #[test]
    fn stochastic_rounding_is_unbiased() {
        for short in [0x0080, 0x3f80, 0x3f81, 0x4479, 0x7f00] {
            check_mean::<Bf16>(short);
        }
        // Includes subnormals of fp16, and the border to the normal ones.
        for short in [0, 1, 0x3fe, 0x3ff, 0x400, 0x3c00, 0x3c01, 0x7b00] {
            check_mean::<F16>(short);
        }
    }
}
