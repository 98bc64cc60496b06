//! Where each row of a table is in its files.

use deepnvme_io::mem::PAGE_BYTES;

use crate::blocks::BlockLayout;
use crate::cache::ROWS_MAX;
use crate::error::{Error, Result};
use crate::hot_rows::HotRows;

/// Consecutive rows in one file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RowRange {
    /// Index of the file.
    pub file: usize,
    /// Offset of the first row.
    pub offset: u64,
    /// Number of rows.
    pub rows: u64,
}

/// A table of rows of one size. They lie in ranges of files, in order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Table {
    ranges: Vec<RowRange>,
    /// The first row of each range, and the number of all rows.
    firsts: Vec<u64>,
    row_bytes: usize,
    /// For a packed table.
    blocks: Option<BlockLayout>,
    /// For a packed table with copies of hot rows: these, which lie behind all rows.
    hot: Option<HotRows>,
}

impl Table {
    /// Creates a table of these ranges, in order.
    ///
    /// # Errors
    /// `Invalid` if rows have no bytes, a range ends beyond the largest file offset, or there are 2^40 rows or more.
    pub fn new(ranges: Vec<RowRange>, row_bytes: usize) -> Result<Self> {
        if row_bytes == 0 {
            return Err(Error::Invalid("rows of no bytes cannot be read; give a table with columns".into()));
        }
        let mut firsts = vec![0];
        for range in &ranges {
            let end = range.rows.checked_mul(row_bytes as u64).and_then(|bytes| bytes.checked_add(range.offset));
            let rows = firsts.last().unwrap_or(&0) + range.rows.min(ROWS_MAX);
            if end.is_none_or(|end| end > i64::MAX as u64) || rows >= ROWS_MAX {
                let detail = format!("{} rows of {row_bytes} bytes at {} are too many", range.rows, range.offset);
                return Err(Error::Invalid(format!("{detail}; a table has fewer than {ROWS_MAX} rows")));
            }
            firsts.push(rows);
        }
        Ok(Self { ranges, firsts, row_bytes, blocks: None, hot: None })
    }

    /// Creates a packed table: rows in blocks, of which the first begins at the offset of `range`, a multiple of their
    /// size.
    ///
    /// # Errors
    /// `Invalid` if the blocks cannot be those of a table, or as [`new`](Self::new).
    pub fn packed(range: RowRange, blocks: BlockLayout) -> Result<Self> {
        let bytes = || blocks.blocks(range.rows).checked_mul(blocks.block_bytes as u64)?.checked_add(range.offset);
        let fits = blocks.is_valid() && range.offset.is_multiple_of(blocks.block_bytes as u64);
        if !fits || bytes().is_none_or(|end| end > i64::MAX as u64) {
            let detail = format!("{blocks:?} cannot be the blocks of a table at {}", range.offset);
            return Err(Error::Invalid(detail));
        }
        Ok(Self { blocks: Some(blocks), ..Self::new(vec![range], blocks.row_bytes)? })
    }

    /// Adds copies of hot rows to a packed table. They lie behind its last row, in the same blocks.
    ///
    /// # Errors
    /// `Invalid` if the table is not packed, or as [`packed`](Self::packed).
    pub fn with_hot_rows(self, hot: HotRows) -> Result<Self> {
        let (Some(blocks), [range]) = (self.blocks, &self.ranges[..]) else {
            return Err(Error::Invalid("hot rows of a table that is not packed".into()));
        };
        let range = RowRange { rows: range.rows.saturating_add(hot.len()), ..*range };
        Ok(Self { hot: Some(hot), ..Self::packed(range, blocks)? })
    }

    /// Returns the number of rows.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.places() - self.hot.as_ref().map_or(0, HotRows::len)
    }

    /// Returns the number of rows and of copies of rows.
    pub(crate) fn places(&self) -> u64 {
        self.firsts[self.ranges.len()]
    }

    /// Returns the copies of hot rows.
    pub(crate) fn hot(&self) -> Option<&HotRows> {
        self.hot.as_ref()
    }

    /// Returns the bytes of a row.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Returns the ranges, in order.
    #[must_use]
    pub fn ranges(&self) -> &[RowRange] {
        &self.ranges
    }

    /// Returns the blocks of a packed table.
    #[must_use]
    pub fn blocks(&self) -> Option<&BlockLayout> {
        self.blocks.as_ref()
    }

    /// Returns the size of which reads are multiples.
    pub(crate) fn alignment(&self) -> u64 {
        self.blocks.map_or(PAGE_BYTES, |blocks| blocks.block_bytes as u64)
    }

    /// Returns the offset behind the last byte of a range.
    pub(crate) fn end_of(&self, range: &RowRange) -> u64 {
        let bytes = match &self.blocks {
            Some(blocks) => blocks.blocks(range.rows) * blocks.block_bytes as u64,
            None => range.rows * self.row_bytes as u64,
        };
        range.offset + bytes
    }

    /// Returns the file and the offset of a row, or of a copy of one by its place.
    ///
    /// # Panics
    /// If there is no such row.
    #[must_use]
    pub fn locate(&self, place: u64) -> (usize, u64) {
        assert!(place < self.places(), "row {place} of {}", self.places());
        let at = self.firsts.partition_point(|first| *first <= place) - 1;
        let range = &self.ranges[at];
        let inside = place - self.firsts[at];
        (range.file, range.offset + self.blocks.map_or(inside * self.row_bytes as u64, |blocks| blocks.offset(inside)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(file: usize, offset: u64, rows: u64) -> RowRange {
        RowRange { file, offset, rows }
    }

    #[test]
    fn rows_follow_their_ranges() {
        let table = Table::new(vec![range(0, 100, 3), range(1, 8, 0), range(2, 0, 2)], 10).unwrap();
        let found: Vec<_> = (0..table.rows()).map(|row| table.locate(row)).collect();
        assert_eq!(found, [(0, 100), (0, 110), (0, 120), (2, 0), (2, 10)]);
    }

    #[test]
    fn impossible_tables_are_refused() {
        assert!(Table::new(vec![range(0, 0, 1)], 0).is_err());
        assert!(Table::new(vec![range(0, 0, ROWS_MAX)], 1).is_err());
        assert!(Table::new(vec![range(0, 0, u64::MAX)], 1).is_err());
        assert!(Table::new(vec![range(0, u64::MAX - 5, 1)], 10).is_err());
        assert!(Table::new(vec![range(0, 0, ROWS_MAX - 1), range(0, 0, 1)], 1).is_err());
        assert_eq!(Table::new(Vec::new(), 4).unwrap().rows(), 0);
    }
}
