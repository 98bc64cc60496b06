//! The innermost loops: rows and columns of equal runs, with a loop of its own for each common size.

use std::ptr;

/// Columns that a tile takes where they lie far apart in memory. No more than a small cache has ways: lines that are a
/// power of two apart all fall into one set.
const TILE_COLUMNS: usize = 8;
/// Rows that are copied a column at a time, before the cache has forgotten what the first column brought.
const TILE_ROWS: usize = 256;

/// Runs in rows and columns. In the flat order they lie side by side, row after row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plane {
    pub(crate) run_bytes: usize,
    pub(crate) columns: usize,
    /// Bytes from a run to the next one of its row.
    pub(crate) column_stride: isize,
    pub(crate) rows: usize,
    /// Bytes from a run to the next one of its column.
    pub(crate) row_stride: isize,
}

impl Plane {
    /// Bytes of all runs.
    pub(crate) fn flat_bytes(&self) -> usize {
        self.rows * self.columns * self.run_bytes
    }

    /// Copies the runs between `strided`, the address of the first one, and `flat`: to `flat` when gathering, from it
    /// otherwise.
    ///
    /// A row at a time is right where the runs of a row lie close. After a transposition they do not: every run would
    /// fetch a cache line, and the next row all of them again. Then a few columns at a time share what was fetched.
    /// Rows of a few runs are copied a column at a time, since short loops are slow ones.
    ///
    /// # Safety
    /// The side that is read is valid for reads, the other for writes, over every run.
    pub(crate) unsafe fn copy<const GATHER: bool>(self, strided: *mut u8, flat: *mut u8) {
        let columns_far = self.column_stride.unsigned_abs() > self.row_stride.unsigned_abs();
        let (tile_rows, tile_columns) = match (self.rows, self.columns) {
            (1, columns) => (1, columns),
            (_, columns @ ..TILE_COLUMNS) => (TILE_ROWS, columns),
            (rows, _) if columns_far => (rows, TILE_COLUMNS),
            (rows, columns) => (rows, columns),
        };
        for row in (0..self.rows).step_by(tile_rows) {
            for column in (0..self.columns).step_by(tile_columns) {
                let rows = self.line_of_rows(tile_rows.min(self.rows - row));
                let columns = self.line_of_columns(tile_columns.min(self.columns - column));
                let (outer, inner) = if self.columns < TILE_COLUMNS { (columns, rows) } else { (rows, columns) };
                let offset_bytes = row as isize * self.row_stride + column as isize * self.column_stride;
                let flat_bytes = (row * self.columns + column) * self.run_bytes;
                // SAFETY: the caller vouches for every run of the plane, and the tile is inside.
                unsafe {
                    let (strided, flat) = (strided.offset(offset_bytes), flat.add(flat_bytes));
                    copy_block::<GATHER>(self.run_bytes, strided, flat, outer, inner);
                }
            }
        }
    }

    fn line_of_rows(&self, runs: usize) -> Line {
        Line { runs, strided_bytes: self.row_stride, flat_bytes: self.columns * self.run_bytes }
    }

    fn line_of_columns(&self, runs: usize) -> Line {
        Line { runs, strided_bytes: self.column_stride, flat_bytes: self.run_bytes }
    }
}

/// Copies `len` bytes between `strided` and `flat`: to `flat` when gathering, from it otherwise.
///
/// # Safety
/// The side that is read is valid for reads of `len` bytes, the other for writes.
#[inline]
pub(crate) unsafe fn copy_piece<const GATHER: bool>(strided: *mut u8, flat: *mut u8, len: usize) {
    let (source, target) = if GATHER { (strided, flat) } else { (flat, strided) };
    // SAFETY: passed on to the caller. The two sides may be parts of one arena, therefore not `copy_nonoverlapping`.
    unsafe { ptr::copy(source, target, len) }
}

/// Some runs in a line: how many, and how far apart on either side.
#[derive(Clone, Copy)]
struct Line {
    runs: usize,
    strided_bytes: isize,
    flat_bytes: usize,
}

/// Copies `outer` lines of `inner` runs, with a loop of its own for each common size.
///
/// # Safety
/// Every run is valid on both sides: for reads on the one copied from, for writes on the other.
unsafe fn copy_block<const GATHER: bool>(run_bytes: usize, strided: *mut u8, flat: *mut u8, outer: Line, inner: Line) {
    macro_rules! by_size {
        ($($bytes:literal)*) => {
            match run_bytes {
                $($bytes => for_each_run(strided, flat, outer, inner, |strided, flat| {
                    copy_item::<$bytes, GATHER>(strided, flat);
                }),)*
                len => for_each_run(strided, flat, outer, inner, |strided, flat| {
                    copy_piece::<GATHER>(strided, flat, len);
                }),
            }
        };
    }
    // SAFETY: passed on to the caller; each loop copies exactly `run_bytes` bytes at a time.
    unsafe { by_size!(1 2 3 4 6 8 12 16 24 32 64) }
}

/// Hands `copy_run` both addresses of every run.
///
/// # Safety
/// Every run lies in the memory that the two addresses lead to.
#[inline]
unsafe fn for_each_run(strided: *mut u8, flat: *mut u8, outer: Line, inner: Line, copy_run: impl Fn(*mut u8, *mut u8)) {
    for line in 0..outer.runs {
        // SAFETY: passed on to the caller.
        let (strided, flat) =
            unsafe { (strided.offset(line as isize * outer.strided_bytes), flat.add(line * outer.flat_bytes)) };
        for run in 0..inner.runs {
            // SAFETY: passed on to the caller.
            unsafe { copy_run(strided.offset(run as isize * inner.strided_bytes), flat.add(run * inner.flat_bytes)) }
        }
    }
}

/// Copies a run of a size that is known here. No alignment is assumed: a tensor may start anywhere.
///
/// # Safety
/// `BYTES` bytes are valid on both sides: for reads on the one copied from, for writes on the other.
#[inline]
unsafe fn copy_item<const BYTES: usize, const GATHER: bool>(strided: *mut u8, flat: *mut u8) {
    let (source, target) = if GATHER { (strided, flat) } else { (flat, strided) };
    // SAFETY: passed on to the caller. The item is read whole before it is written, wherever the two sides lie.
    unsafe { target.cast::<[u8; BYTES]>().write(source.cast::<[u8; BYTES]>().read()) }
}
