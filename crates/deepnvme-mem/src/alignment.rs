//! Alignments: powers of two, checked by their type.

/// Bytes of the smallest page of a supported CPU.
pub const PAGE_BYTES: u64 = 4096;

/// A power of two, in bytes.
///
/// ```
/// use deepnvme_mem::Alignment;
/// assert_eq!(Alignment::PAGE.ceil(4097), 8192);
/// assert_eq!(Alignment::new(3), None);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Alignment(u64);

impl Alignment {
    /// One byte: every address and length is aligned.
    pub const ONE: Self = Self(1);
    /// The smallest page of a supported CPU: [`PAGE_BYTES`](crate::PAGE_BYTES).
    pub const PAGE: Self = Self(PAGE_BYTES);
    /// The huge page of x86-64, and of 64-bit ARM with small base pages: 2 MiB.
    pub const HUGE: Self = Self(2 << 20);

    /// Creates an alignment of `bytes`. Returns `None` if `bytes` is not a power of two.
    #[must_use]
    pub const fn new(bytes: u64) -> Option<Self> {
        if bytes.is_power_of_two() { Some(Self(bytes)) } else { None }
    }

    /// Returns the alignment in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// Rounds `value` down to a multiple.
    #[must_use]
    pub const fn floor(self, value: u64) -> u64 {
        value & !self.mask()
    }

    /// Rounds `value` up to a multiple.
    ///
    /// # Panics
    /// If the multiple does not fit in 64 bits. File offsets and memory addresses stay far below.
    #[must_use]
    pub const fn ceil(self, value: u64) -> u64 {
        assert!(value <= self.floor(u64::MAX), "rounding up must not pass 2^64");
        self.floor(value + self.mask())
    }

    /// Returns whether `value` is a multiple. Zero is a multiple.
    #[must_use]
    pub const fn is_aligned(self, value: u64) -> bool {
        value & self.mask() == 0
    }

    const fn mask(self) -> u64 {
        self.0 - 1
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_powers_of_two_exist() {
        for bytes in [0, 3, 6, 4095, 4097, u64::MAX] {
            assert_eq!(Alignment::new(bytes), None);
        }
        for power in 0..64 {
            assert_eq!(Alignment::new(1 << power).map(Alignment::bytes), Some(1 << power));
        }
        assert!(Alignment::ONE < Alignment::PAGE && Alignment::PAGE < Alignment::HUGE);
    }

    #[test]
    fn the_last_multiple_rounds_to_itself() {
        let last = Alignment::PAGE.floor(u64::MAX);
        assert_eq!(Alignment::PAGE.ceil(last), last);
        assert_eq!(Alignment::ONE.ceil(u64::MAX), u64::MAX);
    }

    #[test]
    #[should_panic(expected = "rounding up must not pass 2^64")]
    fn rounding_past_the_end_is_refused() {
        let _ = Alignment::PAGE.ceil(Alignment::PAGE.floor(u64::MAX) + 1);
    }

    proptest! {
        #[test]
        fn floor_and_ceil_enclose(power in 0_u32..63, value in 0..=u64::MAX / 2) {
            let alignment = Alignment::new(1 << power).unwrap();
            let (low, high) = (alignment.floor(value), alignment.ceil(value));
            prop_assert!(low <= value && value <= high);
            prop_assert!(low % alignment.bytes() == 0 && high % alignment.bytes() == 0);
            let aligned = value % alignment.bytes() == 0;
            prop_assert_eq!(high - low, if aligned { 0 } else { alignment.bytes() });
            prop_assert_eq!(alignment.is_aligned(value), aligned);
        }
    }
}
