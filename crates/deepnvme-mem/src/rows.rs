//! Rows of strided memory.

/// Equally long and equally spaced pieces of memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rows {
    /// Address of the first row.
    pub address: usize,
    /// Bytes of a row.
    pub bytes: usize,
    /// Number of rows.
    pub count: usize,
    /// Bytes from the start of a row to the next. Meaningless for a single row.
    pub pitch: isize,
}

impl Rows {
    /// Returns the bytes of all rows.
    #[must_use]
    pub const fn total_bytes(&self) -> usize {
        self.bytes * self.count
    }

    /// Iterates over the addresses of the rows.
    pub fn addresses(self) -> impl Iterator<Item = usize> {
        let Self { address, count, pitch, .. } = self;
        (0..count as isize).map(move |row| address.wrapping_add_signed(row * pitch))
    }
}
