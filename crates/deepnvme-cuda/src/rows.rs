//! Rows of a 2-D copy.

/// Rows of equal length at a constant pitch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rows {
    /// Address of the first row.
    pub address: usize,
    /// Bytes of a row.
    pub bytes: usize,
    /// Number of rows.
    pub count: usize,
    /// Bytes from the start of a row to the next. Unused for a single row.
    pub pitch: isize,
}

impl Rows {
    /// Creates a single row.
    #[must_use]
    pub const fn single(address: usize, bytes: usize) -> Self {
        Self { address, bytes, count: 1, pitch: 0 }
    }

    /// Returns the bytes of all rows.
    #[must_use]
    pub const fn total_bytes(&self) -> usize {
        self.bytes * self.count
    }

    /// Returns whether the driver copies them in one call: a single row, or rows whose pitch is at least their length
    /// and at most the GPU's maximum.
    pub(crate) fn is_2d(&self, pitch_max: usize) -> bool {
        self.count == 1 || usize::try_from(self.pitch).is_ok_and(|pitch| (self.bytes..=pitch_max).contains(&pitch))
    }

    /// Iterates over single rows.
    pub(crate) fn each_row(&self) -> impl Iterator<Item = Self> + use<> {
        let Self { address, bytes, count, pitch } = *self;
        (0..count as isize).map(move |row| Self::single(address.wrapping_add_signed(row * pitch), bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_one_call_can_copy() {
        let rows = |bytes, count, pitch| Rows { address: 1 << 20, bytes, count, pitch }.is_2d(1 << 18);
        assert!(rows(4, 1000, 64));
        assert!(rows(64, 2, 64));
        assert!(rows(64, 1, -1), "a single row has no distance");
        assert!(!rows(64, 2, 32), "overlapping");
        assert!(!rows(4, 2, -64), "backwards");
        assert!(!rows(4, 2, 1 << 20), "farther than the GPU takes");
    }

    #[test]
    fn rows_one_by_one() {
        let rows = Rows { address: 100, bytes: 4, count: 3, pitch: -8 };
        let places: Vec<_> = rows.each_row().map(|row| (row.address, row.bytes)).collect();
        assert_eq!(places, [(100, 4), (92, 4), (84, 4)]);
        assert_eq!(rows.total_bytes(), 12);
    }
}
