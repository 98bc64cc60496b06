//! The short floats: to fp32 exactly, and back to the nearest or at random. Without branches, so that loops over them
//! become vectors, and without arithmetic on subnormals, so that it does not matter whether the thread flushes them.

/// How a float is laid out.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Float {
    /// IEEE binary32.
    F32,
    /// bfloat16: a sign, eight bits of exponent, seven of mantissa.
    Bf16,
    /// IEEE binary16: a sign, five bits of exponent, ten of mantissa.
    F16,
}

/// A float of sixteen bits.
pub(crate) trait Short {
    /// The same number.
    fn widen(short: u16) -> f32;
    /// The nearest number, the even one of two; infinity where it is too large.
    fn nearest(value: f32) -> u16;
    /// One of the two numbers around it, each as often as it is near: the mean is the value. Only the lower sixteen bits
    /// of the noise count.
    fn stochastic(value: f32, noise: u32) -> u16;
}

/// [`Float::Bf16`].
pub(crate) struct Bf16;
/// [`Float::F16`].
pub(crate) struct F16;

/// fp32's infinity; what is above, sign aside, is a NaN.
pub(crate) const INFINITY: u32 = 0x7f80_0000;
/// All but the sign.
pub(crate) const SIZE: u32 = 0x7fff_ffff;
/// What distinguishes the exponents of fp16 and fp32, in place.
const BIAS: u32 = (127 - 15) << 23;
/// fp16's smallest normal number, as fp32.
const F16_NORMAL: u32 = 0x3880_0000;

impl Short for Bf16 {
    #[inline(always)]
    fn widen(short: u16) -> f32 {
        f32::from_bits(u32::from(short) << 16)
    }

    #[inline(always)]
    fn nearest(value: f32) -> u16 {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        if bits & SIZE > INFINITY { 0x7fc0 } else { rounded as u16 }
    }

    #[inline(always)]
    fn stochastic(value: f32, noise: u32) -> u16 {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(noise & 0xffff) >> 16;
        let kept = if bits & SIZE > INFINITY { 0x7fc0 } else { bits >> 16 };
        (if bits & SIZE >= INFINITY { kept } else { rounded }) as u16
    }
}

impl Short for F16 {
    #[inline(always)]
    fn widen(short: u16) -> f32 {
        let bits = u32::from(short);
        let (sign, size) = ((bits & 0x8000) << 16, bits & 0x7fff);
        let normal = (size << 13) + BIAS;
        // A subnormal is a count of the smallest number.
        let subnormal = (size as i32 as f32 * f32::from_bits((127 - 24) << 23)).to_bits();
        let large = (normal + BIAS) | if size > 0x7c00 { 0x40_0000 } else { 0 };
        f32::from_bits(
            sign | if size < 0x400 {
                subnormal
            } else if size < 0x7c00 {
                normal
            } else {
                large
            },
        )
    }

    #[inline(always)]
    fn nearest(value: f32) -> u16 {
        let (sign, size) = (value.to_bits() >> 16 & 0x8000, value.to_bits() & SIZE);
        let normal = size.wrapping_sub(BIAS).wrapping_add(0xfff + (size >> 13 & 1)) >> 13;
        // One half has as its last bit the smallest number of fp16: the addition rounds to it.
        let subnormal = (f32::from_bits(size) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
        let small = if size < F16_NORMAL { subnormal } else { normal };
        let large = if size > INFINITY { 0x7e00 } else { 0x7c00 };
        // From 65520 on the nearest number is infinity.
        (sign | if size < 0x477f_f000 { small } else { large }) as u16
    }

    #[inline(always)]
    fn stochastic(value: f32, noise: u32) -> u16 {
        let (sign, size) = (value.to_bits() >> 16 & 0x8000, value.to_bits() & SIZE);
        let normal = size.wrapping_sub(BIAS).wrapping_add(noise & 0x1fff) >> 13;
        // A count of the smallest number, and a fraction of it, to which the noise is added before the fraction goes.
        let chance = (noise & 0x1fff) as i32 as f32 * f32::from_bits((127 - 13) << 23);
        let count = f32::from_bits(size.min(F16_NORMAL)) * f32::from_bits((127 + 24) << 23) + chance;
        let small = if size < F16_NORMAL { count as i32 as u32 } else { normal };
        let large = if size > INFINITY { 0x7e00 } else { 0x7c00 };
        // From 65536 on there is no larger number to round to.
        (sign | if size < 0x4780_0000 { small } else { large }) as u16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check<S: Short>(name: &str) {
        for short in 0..=u16::MAX {
            let wide = S::widen(short);
            if wide.is_nan() {
                assert!(S::widen(S::nearest(wide)).is_nan() && S::widen(S::stochastic(wide, 0xffff)).is_nan());
                continue;
            }
            assert_eq!(S::nearest(wide), short, "{name}");
            for noise in [0, 1, 0x1fff, 0x8000, 0xffff_ffff] {
                assert_eq!(S::stochastic(wide, noise), short, "{name}: what needs no rounding stays, {wide:e}");
            }
        }
    }

    #[test]
    fn every_short_number_comes_back() {
        check::<Bf16>("bf16");
        check::<F16>("fp16");
    }

    /// Every sixteenth of the way between two neighbours, over all noise: as many go up as the way says.
    fn check_mean<S: Short>(short: u16) {
        let (low, high) = (S::widen(short), S::widen(short + 1));
        for part in 0..16 {
            let value = low + (high - low) * (part as f32 / 16.0);
            let up = (0..0x1_0000_u32).filter(|noise| S::stochastic(value, *noise) != short).count();
            assert_eq!(up, part * 0x1000, "{short:x}, {part}/16");
            assert!((0..64).all(|noise| [short, short + 1].contains(&S::stochastic(value, noise * 1023))));
            let nearest = if part < 8 || (part == 8 && short.is_multiple_of(2)) { short } else { short + 1 };
            assert_eq!(S::nearest(value), nearest);
        }
    }

    #[test]
    fn as_many_go_up_as_the_way_says() {
        for short in [0x0080, 0x3f80, 0x3f81, 0x4479, 0x7f00] {
            check_mean::<Bf16>(short);
        }
        // Subnormals of fp16 among them, and the border to the normal ones.
        for short in [0, 1, 0x3fe, 0x3ff, 0x400, 0x3c00, 0x3c01, 0x7b00] {
            check_mean::<F16>(short);
        }
    }
}
