//! The floating-point types of weights.

/// A floating-point type. Its bytes are little-endian.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum Float {
    /// bfloat16: a sign, 8 exponent bits, 7 mantissa bits.
    Bf16,
    /// IEEE binary16: a sign, 5 exponent bits, 10 mantissa bits.
    F16,
    /// IEEE binary32: a sign, 8 exponent bits, 23 mantissa bits.
    F32,
}

impl Float {
    /// All types.
    pub const ALL: [Self; 3] = [Self::Bf16, Self::F16, Self::F32];

    /// Returns the bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}
