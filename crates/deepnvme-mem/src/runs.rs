//! Copying between a strided tensor and its flat, row-major bytes.
//!
//! A layout is boiled down to *runs*, the longest pieces that lie side by side in memory and in the flat order, and
//! the few dimensions that are left around them. A copy of any flat range is then a piece of a run, whole runs by the
//! row, and a piece of a run. Memory: one entry per dimension, none per element.

use crate::odometer::{Dim, Odometer};
use crate::plane::{Plane, copy_piece};
use crate::strided::Strided;

/// A layout, ready to copy.
#[derive(Debug)]
pub(crate) struct Runs {
    run_bytes: usize,
    dims: Vec<Dim>,
    total_bytes: usize,
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

    /// Copies flat bytes from `at` on, out of the tensor or into it.
    ///
    /// # Safety
    /// Every element and `len` bytes of `flat` are valid: for reads on the side copied from, for writes on the other.
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
            self.for_each_plane(run, whole_runs, |offset_bytes, plane| {
                plane.copy::<GATHER>(start.offset(offset_bytes), flat);
                flat = flat.add(plane.flat_bytes());
            });
            left -= whole_runs * self.run_bytes;
            if left > 0 {
                copy_piece::<GATHER>(start.offset(self.offset_bytes(run + whole_runs)), flat, left);
            }
        }
    }

    /// Visits the pieces of the flat bytes from `at` on, in their order: where the first of some equal ones is, from the
    /// first element, how long and how many they are, and how far apart.
    pub(crate) fn each_row(&self, at: usize, len: usize, mut visit: impl FnMut(isize, usize, usize, isize)) {
        let (mut run, within, mut left) = (at / self.run_bytes, at % self.run_bytes, len);
        if within > 0 {
            let piece = left.min(self.run_bytes - within);
            visit(self.offset_bytes(run) + within as isize, piece, 1, 0);
            (run, left) = (run + 1, left - piece);
        }
        let whole_runs = left / self.run_bytes;
        self.for_each_plane(run, whole_runs, |offset_bytes, plane| {
            for row in 0..plane.rows as isize {
                let start = offset_bytes + row * plane.row_stride;
                visit(start, plane.run_bytes, plane.columns, plane.column_stride);
            }
        });
        left -= whole_runs * self.run_bytes;
        if left > 0 {
            visit(self.offset_bytes(run + whole_runs), left, 1, 0);
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

    /// Visits `runs` runs from `first` on: where the first run of a plane is, and the plane. A plane has one row, which
    /// may be a part of the innermost dimension, or as many whole ones as there are before an outer dimension moves on.
    fn for_each_plane(&self, first: usize, runs: usize, mut visit: impl FnMut(isize, Plane)) {
        let mut plane = Plane { run_bytes: self.run_bytes, columns: runs, column_stride: 0, rows: 1, row_stride: 0 };
        let Some((inner, outer)) = self.dims.split_last() else {
            // Without dimensions around it there is one run, taken whole or not at all.
            if runs > 0 {
                visit(0, plane);
            }
            return;
        };
        plane.column_stride = inner.stride_bytes;
        plane.row_stride = outer.last().map_or(0, |dim| dim.stride_bytes);
        let mut odometer = Odometer::new(outer, first / inner.count);
        let mut column = first % inner.count;
        let mut left = runs;
        while left > 0 {
            plane.columns = left.min(inner.count - column);
            let whole_rows = if column == 0 { left / inner.count } else { 1 };
            plane.rows = odometer.ahead().min(whole_rows).max(1);
            visit(odometer.offset_bytes + column as isize * inner.stride_bytes, plane);
            left -= plane.rows * plane.columns;
            odometer.advance(plane.rows);
            column = 0;
        }
    }
}
