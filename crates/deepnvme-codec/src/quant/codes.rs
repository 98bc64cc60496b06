//! The two 8-bit codes, without branches so that loops are vectorised.

/// An 8-bit number format.
pub(super) trait QuantCode {
    /// The largest value.
    const MAX: f32;
    /// Rounds a number to the nearest code. Its magnitude is at most [`QuantCode::MAX`], and it is not a NaN.
    fn encode(value: f32) -> u8;
    /// Returns the value of a code.
    fn decode(code: u8) -> f32;
}

/// [`Int8`](super::CodeType::Int8).
pub(super) struct Int8;
/// [`F8E4m3`](super::CodeType::F8E4m3).
pub(super) struct E4m3;

/// The difference of the exponent biases of fp32 and e4m3, shifted to the exponent field of fp32.
const BIAS: u32 = (127 - 7) << 23;

impl QuantCode for Int8 {
    const MAX: f32 = 127.0;

    #[inline(always)]
    fn encode(value: f32) -> u8 {
        // The last bit of this number stands for 1, so the addition rounds and leaves the integer in the low bits.
        (value + 12_582_912.0).to_bits() as u8
    }

    #[inline(always)]
    fn decode(code: u8) -> f32 {
        f32::from(code as i8)
    }
}

impl QuantCode for E4m3 {
    const MAX: f32 = 448.0;

    #[inline(always)]
    fn encode(value: f32) -> u8 {
        let (sign, magnitude) = (value.to_bits() >> 24 & 0x80, value.to_bits() & 0x7fff_ffff);
        let normal = magnitude.wrapping_sub(BIAS).wrapping_add(0x7_ffff + (magnitude >> 20 & 1)) >> 20;
        // The last bit of this number equals the smallest e4m3 number.
        let subnormal = (f32::from_bits(magnitude) + 16384.0).to_bits().wrapping_sub(16384.0_f32.to_bits());
        // Below 2^-6, the smallest normal e4m3 number.
        (sign | if magnitude < 0x3c80_0000 { subnormal } else { normal }) as u8
    }

    #[inline(always)]
    fn decode(code: u8) -> f32 {
        let (sign, magnitude) = (u32::from(code & 0x80) << 24, u32::from(code & 0x7f));
        let normal = (magnitude << 20) + BIAS;
        let subnormal = (magnitude as i32 as f32 * f32::from_bits((127 - 9) << 23)).to_bits();
        let number = if magnitude < 8 { subnormal } else { normal };
        f32::from_bits(sign | if magnitude == 0x7f { 0x7fc0_0000 } else { number })
    }
}
