//! Where each row of a table is in its files.

use deepnvme_io::mem::PAGE_BYTES;

use crate::blocks::{BlockChecker, BlockLayout, ChecksumPlace};
use crate::cache::ROWS_MAX;
use crate::checksum_list::ChecksumList;
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
    /// For a packed table whose blocks do not contain their checksums.
    checksums: Option<ChecksumList>,
    /// The id of a packed table.
    id: u64,
}

/// The parts of a packed table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PackedTable {
    /// The rows, without copies. The offset is that of the first block.
    pub range: RowRange,
    /// The id, which tells its blocks from those of other tables.
    pub id: u64,
    /// The division into blocks.
    pub layout: BlockLayout,
    /// The hot rows, if there are copies of some.
    pub hot: Option<HotRows>,
    /// The checksums of all blocks, if they are in a list.
    pub checksums: Option<ChecksumList>,
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
        Ok(Self { ranges, firsts, row_bytes, blocks: None, hot: None, checksums: None, id: 0 })
    }

    /// Creates a packed table. Copies of hot rows lie behind its last row, in the same blocks.
    ///
    /// # Errors
    /// `Invalid` if the blocks cannot be those of a table, do not begin at a multiple of their size, or the list of
    /// checksums is missing or has another length. As [`new`](Self::new).
    pub fn packed(packed: PackedTable) -> Result<Self> {
        let PackedTable { range, id, layout, hot, checksums } = packed;
        let copies = hot.as_ref().map_or(0, HotRows::len);
        let range = RowRange { rows: range.rows.saturating_add(copies), ..range };
        let blocks = layout.is_valid().then(|| layout.blocks(range.rows));
        let end = blocks
            .and_then(|blocks| blocks.checked_mul(layout.block_bytes as u64))
            .and_then(|bytes| bytes.checked_add(range.offset))
            .filter(|end| *end <= i64::MAX as u64);
        let listed = (layout.checksums == ChecksumPlace::List).then_some(blocks).flatten();
        let has_checksums = listed == checksums.as_ref().map(ChecksumList::blocks);
        if end.is_none() || !range.offset.is_multiple_of(layout.block_bytes as u64) || !has_checksums {
            let detail = format!("{layout:?} cannot be the blocks of a table at {}", range.offset);
            return Err(Error::Invalid(detail));
        }
        Ok(Self { blocks: Some(layout), hot, checksums, id, ..Self::new(vec![range], layout.row_bytes)? })
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

    /// Returns what compares the blocks of a packed table with their checksums.
    pub(crate) fn checker(&self) -> Option<BlockChecker> {
        self.blocks.map(|layout| BlockChecker { layout, id: self.id, list: self.checksums.clone() })
    }

    /// Returns the memory that the hot rows and the checksums take, in bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.hot.as_ref().map_or(0, HotRows::memory_bytes)
            + self.checksums.as_ref().map_or(0, ChecksumList::memory_bytes)
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
