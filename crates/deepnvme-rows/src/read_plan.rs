//! The reads that bring rows into a buffer: pages of the files, with neighbouring rows in one read.

use std::ops::Range;

use crate::table::Table;

/// Largest gap between two rows that is read rather than skipped: another read costs more than these bytes.
const GAP_BYTES_MAX: u64 = 4096;

/// The files of a table, as far as reads depend on them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct FileSizes {
    /// Reads begin at multiples of this, and end at multiples or with their file.
    pub(crate) alignment: u64,
    pub(crate) bytes: Vec<u64>,
}

/// One read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Run {
    pub(crate) file: usize,
    /// The range of the file.
    pub(crate) range: Range<u64>,
    /// Its place in the buffer, a multiple of the alignment.
    pub(crate) start: usize,
}

impl Run {
    pub(crate) fn len(&self) -> usize {
        (self.range.end - self.range.start) as usize
    }
}

/// Collects rows until a buffer is full.
#[derive(Debug)]
pub(crate) struct ReadPlan<'a> {
    table: &'a Table,
    files: &'a FileSizes,
    buffer_bytes: usize,
    runs: Vec<Run>,
}

impl<'a> ReadPlan<'a> {
    pub(crate) fn new(table: &'a Table, files: &'a FileSizes, buffer_bytes: usize) -> Self {
        Self { table, files, buffer_bytes, runs: Vec::new() }
    }

    /// Returns the bytes of a buffer that holds any row.
    pub(crate) fn bytes_min(row_bytes: usize, alignment: u64) -> u64 {
        // Its first and its last byte may lie in pages that it fills in part.
        (row_bytes as u64 - 1).next_multiple_of(alignment) + alignment
    }

    /// Returns whether `row`, which must be above the rows before it, would fit.
    pub(crate) fn fits(&self, row: u64) -> bool {
        self.with(row).end() <= self.buffer_bytes
    }

    /// Adds a row that fits, and returns its place in the buffer.
    pub(crate) fn add(&mut self, row: u64) -> usize {
        let Placed { run, is_joined, place } = self.with(row);
        match self.runs.last_mut() {
            Some(last) if is_joined => *last = run,
            _ => self.runs.push(run),
        }
        place
    }

    /// Returns the reads, in the order of the buffer.
    pub(crate) fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Returns the files of the reads.
    pub(crate) fn files(&self) -> Vec<usize> {
        let mut files: Vec<usize> = self.runs.iter().map(|run| run.file).collect();
        files.sort_unstable();
        files.dedup();
        files
    }

    fn with(&self, row: u64) -> Placed {
        let (file, offset) = self.table.locate(row);
        let end = offset + self.table.row_bytes() as u64;
        let from = offset - offset % self.files.alignment;
        // A row beyond the end of a file is read as it is: the engine reports it.
        let until = end.next_multiple_of(self.files.alignment).min(self.files.bytes[file].max(end));
        let last = self.runs.last();
        let joined = last.filter(|run| {
            run.file == file && run.range.start <= from && from <= run.range.end.saturating_add(GAP_BYTES_MAX)
        });
        let run = match (joined, last) {
            (Some(run), _) => Run { range: run.range.start..until.max(run.range.end), ..run.clone() },
            (None, Some(last)) => {
                let start = (last.start + last.len()).next_multiple_of(self.files.alignment as usize);
                Run { file, range: from..until, start }
            }
            (None, None) => Run { file, range: from..until, start: 0 },
        };
        Placed { place: run.start + (offset - run.range.start) as usize, is_joined: joined.is_some(), run }
    }
}

/// A row in the plan.
struct Placed {
    /// Its read.
    run: Run,
    /// Whether this is the last read of the plan, extended.
    is_joined: bool,
    /// Its offset in the buffer.
    place: usize,
}

impl Placed {
    fn end(&self) -> usize {
        self.run.start + self.run.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::table::RowRange;

    fn sizes(bytes: u64) -> FileSizes {
        FileSizes { alignment: 4096, bytes: vec![bytes; 4] }
    }

    fn one_file(offset: u64, rows: u64, row_bytes: usize) -> Table {
        Table::new(vec![RowRange { file: 0, offset, rows }], row_bytes).unwrap()
    }

    #[test]
    fn rows_of_a_page_are_one_read() {
        let (table, files) = (one_file(96, 1000, 160), sizes(1 << 20));
        let mut plan = ReadPlan::new(&table, &files, 1 << 16);
        let places: Vec<_> = [0, 3, 4, 20].map(|row| plan.add(row)).to_vec();
        assert_eq!(places, [96, 576, 736, 3296]);
        assert_eq!(plan.runs(), [Run { file: 0, range: 0..4096, start: 0 }]);
    }

    #[test]
    fn distant_rows_are_separate_reads() {
        let (table, files) = (one_file(0, 1000, 100), sizes(1 << 20));
        let mut plan = ReadPlan::new(&table, &files, 1 << 16);
        assert_eq!([0, 200, 900].map(|row| plan.add(row)), [0, 4096 + 20_000 % 4096, 8192 + 90_000 % 4096]);
        let ranges: Vec<_> = plan.runs().iter().map(|run| run.range.clone()).collect();
        assert_eq!(ranges, [0..4096, 16_384..20_480, 86_016..90_112]);
    }

    #[test]
    fn a_read_ends_with_its_file() {
        let (table, files) = (one_file(0, 100, 100), sizes(10_000));
        let mut plan = ReadPlan::new(&table, &files, 1 << 16);
        plan.add(99);
        assert_eq!(plan.runs(), [Run { file: 0, range: 8192..10_000, start: 0 }]);
    }

    proptest! {
        /// Every row lies in the read that has its bytes, reads do not share memory, and the buffer holds all.
        #[test]
        fn rows_lie_in_their_reads(
            row_bytes in 1_usize..9000,
            offset in 0_u64..5000,
            counts in proptest::collection::vec(0_u64..200, 1..4),
            picks in proptest::collection::btree_set(0_u64..600, 1..80),
            pages in 1_usize..40,
        ) {
            let ranges: Vec<_> = counts.iter().enumerate().map(|(file, rows)| RowRange { file, offset, rows: *rows }).collect();
            let table = Table::new(ranges, row_bytes).unwrap();
            let bytes: Vec<u64> = counts.iter().map(|rows| offset + rows * row_bytes as u64).collect();
            let files = FileSizes { alignment: 4096, bytes };
            let buffer_bytes = (ReadPlan::bytes_min(row_bytes, 4096) as usize).max(pages * 4096);
            let mut plan = ReadPlan::new(&table, &files, buffer_bytes);
            let mut placed = Vec::new();
            for row in picks.into_iter().filter(|row| *row < table.rows()) {
                if !plan.fits(row) {
                    break;
                }
                placed.push((row, plan.add(row)));
            }
            prop_assert!(table.rows() == 0 || !placed.is_empty() || plan.runs().is_empty());
            for (row, place) in placed {
                let (file, offset) = table.locate(row);
                let holds = |run: &&Run| run.file == file && run.range.start <= offset && offset + row_bytes as u64 <= run.range.end;
                let run = plan.runs().iter().find(holds).expect("a read for each row");
                prop_assert_eq!(place - run.start, (offset - run.range.start) as usize);
            }
            let mut end = 0;
            for run in plan.runs() {
                prop_assert!(run.start >= end && run.start % 4096 == 0 && run.range.start % 4096 == 0);
                prop_assert!(run.range.end <= files.bytes[run.file] && run.range.start < run.range.end);
                end = run.start + run.len();
            }
            prop_assert!(end <= buffer_bytes);
        }
    }
}
