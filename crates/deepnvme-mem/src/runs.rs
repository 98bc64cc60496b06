//! Copying between a strided tensor and its flat, row-major bytes.
//!
//! A layout is boiled down to *runs*, the longest pieces that lie side by side in memory and in the flat order, and
//! the few dimensions that are left around them. A copy of any flat range is then a piece of a run, whole runs by the
//! row, and a piece of a run. Memory: one entry per dimension, none per element.

use crate::rows::{copy_piece, copy_row};
use crate::strided::{DIMS_MAX, Strided};

/// A layout, ready to copy.
#[derive(Debug)]
pub(crate) struct Runs {
    run_bytes: usize,
    dims: Vec<Dim>,
    total_bytes: usize,
}

/// One dimension around the runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Dim {
    count: usize,
    stride_bytes: isize,
}

impl Runs {
    /// # Panics
    /// When [`Strided::check`] finds fault with the layout.
    pub(crate) fn new(layout: &Strided) -> Self {
        let checked = layout.check();
        assert!(checked.is_ok(), "a layout must be checked before memory is described with it: {checked:?}");
        let total_bytes = layout.total_bytes();
        let mut run_bytes = layout.item_bytes;
        let mut dims: Vec<Dim> = Vec::new();
        for (count, stride_bytes) in layout.wide_dims().rev().filter(|_| total_bytes > 0) {
            match dims.last_mut() {
                None if stride_bytes == run_bytes as isize => run_bytes *= count,
                Some(inner) if Some(stride_bytes) == inner.span_bytes() => inner.count *= count,
                _ => dims.push(Dim { count, stride_bytes }),
            }
        }
        dims.reverse();
        Self { run_bytes, dims, total_bytes }
    }

    pub(crate) fn total_bytes(&self) -> usize {
        self.total_bytes
    }

    /// Whether one run is all there is.
    pub(crate) fn is_contiguous(&self) -> bool {
        self.dims.is_empty()
    }

    /// Copies the flat bytes `from..from + len` of the tensor at `start` to `target`.
    ///
    /// # Safety
    /// Every element is valid for reads, and `target` for writes of `len` bytes.
    pub(crate) unsafe fn gather(&self, start: *mut u8, from: usize, target: *mut u8, len: usize) {
        // SAFETY: passed on to the caller.
        unsafe { self.copy::<true>(start, from, target, len) }
    }

    /// Copies `len` bytes of `source` over the flat bytes of the tensor at `start` from `to` on.
    ///
    /// # Safety
    /// Every element is valid for writes, and `source` for reads of `len` bytes.
    pub(crate) unsafe fn scatter(&self, start: *mut u8, to: usize, source: *const u8, len: usize) {
        // SAFETY: passed on to the caller; a scatter only reads through the pointer that is made mutable here.
        unsafe { self.copy::<false>(start, to, source.cast_mut(), len) }
    }

    unsafe fn copy<const GATHER: bool>(&self, start: *mut u8, at: usize, flat: *mut u8, len: usize) {
        assert!(at <= self.total_bytes && len <= self.total_bytes - at, "a copy stays inside the tensor");
        if len == 0 {
            return;
        }
        let (mut flat, mut left) = (flat, len);
        let (mut run, within) = (at / self.run_bytes, at % self.run_bytes);
        // SAFETY: runs below `total_bytes / run_bytes` lie in the tensor, whose elements the caller vouches for, and
        // `flat` moves on by what is taken from `left`.
        unsafe {
            if within > 0 {
                let piece = left.min(self.run_bytes - within);
                copy_piece::<GATHER>(start.offset(self.offset_bytes(run)).add(within), flat, piece);
                (flat, left, run) = (flat.add(piece), left - piece, run + 1);
            }
            let whole_runs = left / self.run_bytes;
            self.for_each_row(run, whole_runs, |offset_bytes, stride_bytes, count| {
                copy_row::<GATHER>(start.offset(offset_bytes), stride_bytes, flat, self.run_bytes, count);
                flat = flat.add(count * self.run_bytes);
            });
            left -= whole_runs * self.run_bytes;
            if left > 0 {
                copy_piece::<GATHER>(start.offset(self.offset_bytes(run + whole_runs)), flat, left);
            }
        }
    }

    /// Where a run starts, from the address of the first one.
    fn offset_bytes(&self, run: usize) -> isize {
        let mut rest = run;
        let mut offset_bytes = 0;
        for dim in self.dims.iter().rev() {
            offset_bytes += (rest % dim.count) as isize * dim.stride_bytes;
            rest /= dim.count;
        }
        offset_bytes
    }

    /// Visits `runs` runs from `first` on, as rows of the innermost dimension: offset of the first run of the row,
    /// bytes from one to the next, how many.
    fn for_each_row(&self, first: usize, runs: usize, mut visit: impl FnMut(isize, isize, usize)) {
        let Some((inner, outer)) = self.dims.split_last() else {
            // Without dimensions around it there is one run, taken whole or not at all.
            if runs > 0 {
                visit(0, 0, runs);
            }
            return;
        };
        let mut at = [0; DIMS_MAX];
        let at = &mut at[..outer.len()];
        let mut rest = first / inner.count;
        for (index, dim) in at.iter_mut().zip(outer).rev() {
            (*index, rest) = (rest % dim.count, rest / dim.count);
        }
        let mut column = first % inner.count;
        let mut offset_bytes = self.offset_bytes(first);
        let mut left = runs;
        while left > 0 {
            let count = left.min(inner.count - column);
            visit(offset_bytes, inner.stride_bytes, count);
            left -= count;
            offset_bytes -= column as isize * inner.stride_bytes;
            column = 0;
            // On to the next row, like an odometer. Past an end the sum may wrap; taking the whole way back unwraps it.
            for (index, dim) in at.iter_mut().zip(outer).rev() {
                *index += 1;
                offset_bytes = offset_bytes.wrapping_add(dim.stride_bytes);
                if *index < dim.count {
                    break;
                }
                *index = 0;
                offset_bytes = offset_bytes.wrapping_sub(dim.stride_bytes.wrapping_mul(dim.count as isize));
            }
        }
    }
}

impl Dim {
    /// Bytes from the first item to where the item after the last one would be.
    fn span_bytes(self) -> Option<isize> {
        self.stride_bytes.checked_mul(isize::try_from(self.count).ok()?)
    }
}
