//! 2-D copies between strided and contiguous memory, with a specialised loop for each common item size.

use std::ptr;

use crate::multi_index::Dim;

/// Columns of a tile when columns are far apart in memory. It does not exceed the ways of a small cache: lines whose
/// distance is a power of two share a set.
const TILE_COLUMNS: usize = 8;
/// Rows of a tile that is copied column by column. The lines of the first column must still be cached for the last.
const TILE_ROWS: usize = 256;

/// Rows and columns of equal runs. In the flat order they are adjacent, row after row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copy2d {
    pub(crate) run_bytes: usize,
    /// The runs of a row.
    pub(crate) columns: Dim,
    /// The runs of a column.
    pub(crate) rows: Dim,
}

impl Copy2d {
    /// Creates a copy of one run.
    pub(crate) fn single(run_bytes: usize) -> Self {
        let one = Dim { count: 1, stride_bytes: 0 };
        Self { run_bytes, columns: one, rows: one }
    }

    /// Returns the bytes of all runs.
    pub(crate) fn flat_bytes(&self) -> usize {
        self.rows.count * self.columns.count * self.run_bytes
    }

    /// Copies the runs between `strided`, the address of the first one, and `flat`: to `flat` when gathering, else
    /// from it.
    ///
    /// Row by row is fast if the runs of a row are close. After a transposition they are not: every run fetches a
    /// cache line, and the next row fetches all of them again. Then tiles of a few columns share the fetched lines.
    /// Rows of few runs are copied column by column, because short inner loops are slow.
    ///
    /// # Safety
    /// Every run is valid for reads on the source side and for writes on the other.
    pub(crate) unsafe fn copy<const GATHER: bool>(self, strided: *mut u8, flat: *mut u8) {
        let columns_far = self.columns.stride_bytes.unsigned_abs() > self.rows.stride_bytes.unsigned_abs();
        let (tile_rows, tile_columns) = match (self.rows.count, self.columns.count) {
            (1, columns) => (1, columns),
            (_, columns @ ..TILE_COLUMNS) => (TILE_ROWS, columns),
            (rows, _) if columns_far => (rows, TILE_COLUMNS),
            (rows, columns) => (rows, columns),
        };
        for row in (0..self.rows.count).step_by(tile_rows) {
            for column in (0..self.columns.count).step_by(tile_columns) {
                let rows = self.row_axis(tile_rows.min(self.rows.count - row));
                let columns = self.column_axis(tile_columns.min(self.columns.count - column));
                let (outer, inner) = if self.columns.count < TILE_COLUMNS { (columns, rows) } else { (rows, columns) };
                let offset_bytes = row as isize * self.rows.stride_bytes + column as isize * self.columns.stride_bytes;
                let flat_bytes = (row * self.columns.count + column) * self.run_bytes;
                // SAFETY: every run of the copy is valid, as the caller of this function ensures, and the tile lies
                // inside the copy.
                unsafe {
                    let (strided, flat) = (strided.offset(offset_bytes), flat.add(flat_bytes));
                    copy_tile::<GATHER>(self.run_bytes, strided, flat, outer, inner);
                }
            }
        }
    }

    fn row_axis(&self, runs: usize) -> TileAxis {
        TileAxis { runs, strided_bytes: self.rows.stride_bytes, flat_bytes: self.columns.count * self.run_bytes }
    }

    fn column_axis(&self, runs: usize) -> TileAxis {
        TileAxis { runs, strided_bytes: self.columns.stride_bytes, flat_bytes: self.run_bytes }
    }
}

/// Copies `len` bytes between `strided` and `flat`: to `flat` when gathering, else from it.
///
/// # Safety
/// `len` bytes are valid for reads on the source side and for writes on the other.
#[inline]
unsafe fn copy_bytes<const GATHER: bool>(strided: *mut u8, flat: *mut u8, len: usize) {
    let (source, target) = if GATHER { (strided, flat) } else { (flat, strided) };
    // SAFETY: `len` bytes are valid on both sides, as the caller of `copy_bytes` ensures. Both sides may belong to one
    // arena, so `copy_nonoverlapping` is not allowed.
    unsafe { ptr::copy(source, target, len) }
}

/// One axis of a tile: the number of runs, and their distance on either side.
#[derive(Clone, Copy)]
struct TileAxis {
    runs: usize,
    strided_bytes: isize,
    flat_bytes: usize,
}

/// Copies `outer` times `inner` runs, with a specialised loop for each common size.
///
/// # Safety
/// Every run is valid for reads on the source side and for writes on the other.
unsafe fn copy_tile<const GATHER: bool>(
    run_bytes: usize,
    strided: *mut u8,
    flat: *mut u8,
    outer: TileAxis,
    inner: TileAxis,
) {
    macro_rules! by_size {
        ($($bytes:literal)*) => {
            match run_bytes {
                $($bytes => for_each_run(strided, flat, outer, inner, |strided, flat| {
                    copy_item::<$bytes, GATHER>(strided, flat);
                }),)*
                len => for_each_run(strided, flat, outer, inner, |strided, flat| {
                    copy_bytes::<GATHER>(strided, flat, len);
                }),
            }
        };
    }
    // SAFETY: every run is valid on both sides, as the caller of `copy_tile` ensures. Each loop copies exactly
    // `run_bytes` bytes per run.
    unsafe { by_size!(1 2 3 4 6 8 12 16 24 32 64) }
}

/// Calls `copy_run` with both addresses of every run.
///
/// # Safety
/// Every run lies inside the memory at the two addresses.
#[inline]
unsafe fn for_each_run(
    strided: *mut u8,
    flat: *mut u8,
    outer: TileAxis,
    inner: TileAxis,
    copy_run: impl Fn(*mut u8, *mut u8),
) {
    for line in 0..outer.runs {
        // SAFETY: `line` is below the count, and its first run lies in the memory at the two addresses, as the caller
        // of `for_each_run` ensures.
        let (strided, flat) =
            unsafe { (strided.offset(line as isize * outer.strided_bytes), flat.add(line * outer.flat_bytes)) };
        for run in 0..inner.runs {
            // SAFETY: `line` and `run` are below the counts, and every such run lies in the memory at the two
            // addresses, as the caller of `for_each_run` ensures.
            unsafe { copy_run(strided.offset(run as isize * inner.strided_bytes), flat.add(run * inner.flat_bytes)) }
        }
    }
}

/// Copies a run of a constant size. It need not be aligned, since a tensor may start anywhere.
///
/// # Safety
/// `BYTES` bytes are valid for reads on the source side and for writes on the other.
#[inline]
unsafe fn copy_item<const BYTES: usize, const GATHER: bool>(strided: *mut u8, flat: *mut u8) {
    let (source, target) = if GATHER { (strided, flat) } else { (flat, strided) };
    // SAFETY: `BYTES` bytes are valid on both sides, as the caller of `copy_item` ensures. The item is read before it
    // is written, so both sides may overlap.
    unsafe { target.cast::<[u8; BYTES]>().write(source.cast::<[u8; BYTES]>().read()) }
}
