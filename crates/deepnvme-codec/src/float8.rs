//! Conversions from 8-bit floats to fp32, exact and equal to torch's. Each has 256 values, so they are looked up.

/// An 8-bit floating-point type. The names are torch's.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Float8 {
    /// `float8_e4m3fn`: a sign, 4 exponent bits, 3 mantissa bits; no infinity.
    E4m3fn,
    /// `float8_e5m2`: a sign, 5 exponent bits, 2 mantissa bits.
    E5m2,
    /// `float8_e8m0fnu`: a power of two, for scales.
    E8m0fnu,
}

static E4M3FN: [f32; 256] = table(Float8::E4m3fn);
static E5M2: [f32; 256] = table(Float8::E5m2);
static E8M0FNU: [f32; 256] = table(Float8::E8m0fnu);

impl Float8 {
    /// Returns the value of each code.
    #[must_use]
    pub fn values(self) -> &'static [f32; 256] {
        match self {
            Self::E4m3fn => &E4M3FN,
            Self::E5m2 => &E5M2,
            Self::E8m0fnu => &E8M0FNU,
        }
    }
}

const fn table(kind: Float8) -> [f32; 256] {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = f32::from_bits(match kind {
            Float8::E4m3fn => widen(code as u32, 3, 7, None),
            Float8::E5m2 => widen(code as u32, 2, 15, Some(31)),
            Float8::E8m0fnu => match code as u32 {
                // 2^-127 is subnormal in fp32.
                0 => 1 << 22,
                0xff => NAN,
                exponent => exponent << 23,
            },
        });
        code += 1;
    }
    values
}

const NAN: u32 = 0x7fc0_0000;

/// The bits of an fp32 of the same value. `special` is the exponent of infinity and NaN. Without one, only the largest
/// magnitude is NaN.
const fn widen(code: u32, mantissa_bits: u32, bias: u32, special: Option<u32>) -> u32 {
    let sign = (code >> 7) << 31;
    let magnitude = code & 0x7f;
    let (exponent, mantissa) = (magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1));
    let is_special = match special {
        Some(special) => exponent == special,
        None => magnitude == 0x7f,
    };
    if is_special {
        return sign | if special.is_some() && mantissa == 0 { 0x7f80_0000 } else { NAN };
    }
    if exponent > 0 {
        return sign | (exponent + 127 - bias) << 23 | mantissa << (23 - mantissa_bits);
    }
    if mantissa == 0 {
        return sign;
    }
    // A subnormal, normalised: its highest bit becomes the implied one.
    let shift = mantissa.leading_zeros() - (31 - mantissa_bits);
    let normal = (mantissa << shift) & ((1 << mantissa_bits) - 1);
    sign | (128 - bias - shift) << 23 | normal << (23 - mantissa_bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of a code, by its definition.
    fn value(code: u32, mantissa_bits: i32, bias: i32) -> f64 {
        let magnitude = (code & 0x7f) as i32;
        let (exponent, mantissa) = (magnitude >> mantissa_bits, f64::from(magnitude & ((1 << mantissa_bits) - 1)));
        let fraction = mantissa / f64::from(1 << mantissa_bits);
        let value = if exponent == 0 {
            fraction * 2_f64.powi(1 - bias)
        } else {
            (1.0 + fraction) * 2_f64.powi(exponent - bias)
        };
        if code < 128 { value } else { -value }
    }

    #[test]
    fn every_code() {
        for code in 0..256_u32 {
            let e4m3 = Float8::E4m3fn.values()[code as usize];
            assert!(if code & 0x7f == 0x7f { e4m3.is_nan() } else { f64::from(e4m3) == value(code, 3, 7) }, "{code}");
            let e5m2 = Float8::E5m2.values()[code as usize];
            match code & 0x7f {
                0x7c => assert!(e5m2.is_infinite() && (e5m2 < 0.0) == (code > 128)),
                0x7d.. => assert!(e5m2.is_nan()),
                _ => assert!(f64::from(e5m2) == value(code, 2, 15), "{code}"),
            }
            let e8m0 = Float8::E8m0fnu.values()[code as usize];
            assert!(
                if code == 255 { e8m0.is_nan() } else { f64::from(e8m0) == 2_f64.powi(code as i32 - 127) },
                "{code}"
            );
        }
        assert!(Float8::E4m3fn.values()[128].is_sign_negative());
    }
}
