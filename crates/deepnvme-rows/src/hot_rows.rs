//! Copies of hot rows, the most frequent ones of a trace of ids. They lie together behind the rows of a packed table.
//!
//! A page holds many small rows, of which a gather needs few. Of a page with copies of hot rows it needs more. So it
//! reads fewer pages. Inside this crate, a row is named by its place: its number, or the place of its copy.

use std::sync::Arc;

use deepnvme_file::VersionedFile;
use deepnvme_io::{Engine, Error as IoError, ErrorKind};

use crate::checksum_list::checksum_of;
use crate::error::{Error, Result};
use crate::room::check_room;
use crate::whole_range::read_range;

/// Rows of a bucket, on average.
const BUCKET_ROWS: usize = 8;
/// Memory of each row while a list is read: its number three times, with its copy, and its place in a list to sort.
const BYTES_WHILE_READ: u64 = 32;
/// Bytes of a row's number in the file.
pub(crate) const NUMBER_BYTES: usize = 4;

/// Which rows have copies, and where.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HotRows {
    /// The rows of the table, without copies.
    rows: u64,
    /// Ascending.
    numbers: Vec<u32>,
    /// The copy of each.
    copies: Vec<u32>,
    /// For each range of numbers, the index of the first that is hot.
    buckets: Vec<u32>,
}

/// A list of hot rows in a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HotRowList {
    /// Where it begins.
    pub offset: u64,
    /// How many there are.
    pub count: u64,
    /// The CRC-32C of its bytes.
    pub checksum: u32,
}

impl HotRows {
    /// Describes the copies of these rows of a table, in the order of the copies.
    ///
    /// # Errors
    /// `Invalid` if a number is no row or is repeated, or the table has 2^32 rows or more.
    pub fn new(table_rows: u64, hot: &[u32]) -> Result<Self> {
        let fits = table_rows <= u64::from(u32::MAX) && hot.iter().all(|row| u64::from(*row) < table_rows);
        let mut sorted: Vec<(u32, u32)> = hot.iter().copied().zip(0..).collect();
        sorted.sort_unstable();
        if !fits || sorted.windows(2).any(|pair| pair[0].0 == pair[1].0) {
            let detail = format!("{} hot rows are not different rows of a table of {table_rows}", hot.len());
            return Err(Error::Invalid(format!("{detail}, which may have up to 2^32 - 1")));
        }
        let (numbers, copies): (Vec<u32>, Vec<u32>) = sorted.into_iter().unzip();
        let count = numbers.len() / BUCKET_ROWS + 1;
        let mut hot = Self { rows: table_rows, numbers, copies, buckets: vec![0; count + 1] };
        for number in &hot.numbers {
            let bucket = bucket(*number, table_rows, count);
            hot.buckets[bucket + 1] += 1;
        }
        (1..=count).for_each(|index| hot.buckets[index] += hot.buckets[index - 1]);
        Ok(hot)
    }

    /// Reads a list from a file.
    ///
    /// # Errors
    /// `Io` if it cannot be read, is damaged, or does not fit into memory.
    pub fn read(engine: &Arc<Engine>, file: &VersionedFile, list: HotRowList, table_rows: u64) -> Result<Self> {
        let damaged = |why: String| {
            let detail = format!(
                "the list of hot rows is damaged ({why}); restore the file from a copy, or pack the table again"
            );
            Error::Io(IoError::new(ErrorKind::Corrupt, "read", detail).at_path(file.file().path()))
        };
        if list.count > table_rows || table_rows > u64::from(u32::MAX) {
            return Err(damaged(format!("{} rows of {table_rows}", list.count)));
        }
        check_room(list.count * BYTES_WHILE_READ, "raise the limit of the process (`ulimit -v`)")?;
        let buffer = read_range(engine, file, list.offset, list.count * NUMBER_BYTES as u64)?;
        if checksum_of(buffer.as_slice()) != list.checksum {
            return Err(damaged("CRC-32C".into()));
        }
        let numbers: Vec<u32> =
            buffer.as_slice().as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        Self::new(table_rows, &numbers).map_err(|error| damaged(error.to_string()))
    }

    /// Returns how many rows have copies.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.numbers.len() as u64
    }

    /// Returns whether no row has one.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.numbers.is_empty()
    }

    /// Returns the bytes that this takes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        Self::bytes_of(self.len())
    }

    /// Returns the bytes that this many rows take.
    #[must_use]
    pub fn bytes_of(count: u64) -> u64 {
        let buckets = count / BUCKET_ROWS as u64 + 2;
        count.saturating_mul(2).saturating_add(buckets).saturating_mul(size_of::<u32>() as u64)
    }

    /// Returns the place of a row: that of its copy, if it has one.
    pub(crate) fn place(&self, row: u64) -> u64 {
        let Ok(number) = u32::try_from(row) else { return row };
        let bucket = bucket(number, self.rows, self.buckets.len() - 1);
        let (start, end) = (self.buckets[bucket] as usize, self.buckets[bucket + 1] as usize);
        let found = self.numbers[start..end].binary_search(&number);
        found.map_or(row, |index| self.rows + u64::from(self.copies[start + index]))
    }
}

/// Returns the bucket of a row, of `count`.
fn bucket(number: u32, table_rows: u64, count: usize) -> usize {
    (u128::from(number) * count as u128 / u128::from(table_rows.max(1))) as usize
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn impossible_lists_are_refused() {
        assert!(HotRows::new(10, &[3, 9, 0]).is_ok());
        for (rows, hot) in [(10, &[3, 10][..]), (10, &[3, 3]), (0, &[0]), (1 << 32, &[1])] {
            assert!(HotRows::new(rows, hot).is_err(), "{rows} {hot:?}");
        }
        assert_eq!(HotRows::new(0, &[]).unwrap().place(0), 0);
    }

    proptest! {
        #[test]
        fn hot_rows_have_the_places_of_their_copies(
            rows in 1_u64..1 << 32,
            picks in proptest::collection::btree_set(0_u32..u32::MAX, 0..200),
            from in 0_u64..1 << 32,
        ) {
            let hot: Vec<u32> = picks.into_iter().rev().filter(|row| u64::from(*row) < rows).collect();
            let known = HotRows::new(rows, &hot).unwrap();
            for row in hot.iter().map(|row| u64::from(*row)).chain((0..300).map(|step| (from + step) % rows)) {
                let copy = hot.iter().position(|hot| u64::from(*hot) == row);
                prop_assert_eq!(known.place(row), copy.map_or(row, |copy| rows + copy as u64));
            }
        }
    }
}
