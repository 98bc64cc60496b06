//! Pieces of equal length at equal distances: what one call of the driver can copy.

/// Pieces of equal length at equal distances.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rows {
    /// Where the first one is.
    pub address: usize,
    /// Bytes of each.
    pub bytes: usize,
    /// How many there are.
    pub count: usize,
    /// From the beginning of one to that of the next; of no meaning where there is one.
    pub pitch: isize,
}

/// The longest distance that every GPU's copies take.
const PITCH_MAX: usize = 1 << 18;

impl Rows {
    /// One piece.
    #[must_use]
    pub const fn one(address: usize, bytes: usize) -> Self {
        Self { address, bytes, count: 1, pitch: 0 }
    }

    /// Bytes of all rows.
    #[must_use]
    pub const fn total_bytes(&self) -> usize {
        self.bytes * self.count
    }

    /// Whether the driver copies them in one call: forwards, without an overlap, and not too far apart.
    pub(crate) fn is_plane(&self) -> bool {
        self.count == 1 || usize::try_from(self.pitch).is_ok_and(|pitch| (self.bytes..=PITCH_MAX).contains(&pitch))
    }

    /// Each row by itself.
    pub(crate) fn singly(&self) -> impl Iterator<Item = Self> + use<> {
        let Self { address, bytes, count, pitch } = *self;
        (0..count as isize).map(move |row| Self::one(address.wrapping_add_signed(row * pitch), bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_call_can_copy() {
        let rows = |bytes, count, pitch| Rows { address: 1 << 20, bytes, count, pitch }.is_plane();
        assert!(rows(4, 1000, 64));
        assert!(rows(64, 2, 64));
        assert!(rows(64, 1, -1), "a single row has no distance");
        assert!(!rows(64, 2, 32), "overlapping");
        assert!(!rows(4, 2, -64), "backwards");
        assert!(!rows(4, 2, 1 << 20), "farther than GPUs take");
    }

    #[test]
    fn rows_one_by_one() {
        let rows = Rows { address: 100, bytes: 4, count: 3, pitch: -8 };
        let places: Vec<_> = rows.singly().map(|row| (row.address, row.bytes)).collect();
        assert_eq!(places, [(100, 4), (92, 4), (84, 4)]);
        assert_eq!(rows.total_bytes(), 12);
    }
}
