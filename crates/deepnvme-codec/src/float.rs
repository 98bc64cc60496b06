//! The floating-point types of weights.

/// How a float is laid out in its bytes, which are little-endian.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum Float {
    /// bfloat16: a sign, eight bits of exponent, seven of mantissa.
    Bf16,
    /// IEEE binary16: a sign, five bits of exponent, ten of mantissa.
    F16,
    /// IEEE binary32: a sign, eight bits of exponent, twenty-three of mantissa.
    F32,
}

impl Float {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Bf16, Self::F16, Self::F32];

    /// Bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}
