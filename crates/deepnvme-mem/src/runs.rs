//! Copies between a strided tensor and its flat, row-major bytes.
//!
//! A layout is reduced to *runs*, the longest pieces that are contiguous both in memory and in the flat order, and
//! the few dimensions around them. A copy of any flat range is then a partial run, whole runs by rows, and a partial
//! run. It needs one entry per dimension, none per element.

use crate::copy_2d::Copy2d;
use crate::multi_index::{Dim, MultiIndex};
use crate::strided::Strided;

/// A layout prepared for copies.
#[derive(Debug)]
pub(crate) struct Runs {
    run_bytes: usize,
    dims: Vec<Dim>,
    total_bytes: usize,
}

impl Runs {
    /// # Panics
    /// If [`Strided::check`] rejects the layout.
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

    /// Returns whether the layout is a single run.
    pub(crate) fn is_contiguous(&self) -> bool {
        self.dims.is_empty()
    }

    /// Copies the flat bytes `from..from + len` of the tensor at `start` to `target`.
    ///
    /// # Safety
    /// Every element is valid for reads, and `target` for writes of `len` bytes.
    pub(crate) unsafe fn gather(&self, start: *mut u8, from: usize, target: *mut u8, len: usize) {
        // SAFETY: every element is valid for reads and `target` for writes of `len` bytes, as the caller of `gather`
        // ensures.
        unsafe { self.copy::<true>(start, from, target, len) }
    }

    /// Copies `len` bytes of `source` over the flat bytes of the tensor at `start` from `to` on.
    ///
    /// # Safety
    /// Every element is valid for writes, and `source` for reads of `len` bytes.
    pub(crate) unsafe fn scatter(&self, start: *mut u8, to: usize, source: *const u8, len: usize) {
        // SAFETY: every element is valid for writes and `source` for reads of `len` bytes, as the caller of `scatter`
        // ensures. A scatter only reads through the pointer that becomes mutable here.
        unsafe { self.copy::<false>(start, to, source.cast_mut(), len) }
    }

    /// Copies flat bytes from `at` on, from the tensor or into it.
    ///
    /// # Safety
    /// Every element and `len` bytes of `flat` are valid for reads on the source side and for writes on the other.
    unsafe fn copy<const GATHER: bool>(&self, start: *mut u8, at: usize, flat: *mut u8, len: usize) {
        assert!(at <= self.total_bytes && len <= self.total_bytes - at, "a copy stays inside the tensor");
        let mut flat = flat;
        // SAFETY: the copies lie in the range, which the assertion bounds, of a tensor whose elements are valid, as the
        // caller of `copy` ensures. Their flat bytes are the `len` bytes of `flat`, in order.
        self.for_each_copy(at, len, |offset_bytes, copy| unsafe {
            copy.copy::<GATHER>(start.offset(offset_bytes), flat);
            flat = flat.add(copy.flat_bytes());
        });
    }

    /// Calls `visit(offset, copy)` for the flat bytes from `at` on, in order: the rest of a run, whole runs, and the
    /// start of a run. The offset counts from the first element.
    pub(crate) fn for_each_copy(&self, at: usize, len: usize, mut visit: impl FnMut(isize, Copy2d)) {
        if len == 0 {
            return;
        }
        let (mut run, within, mut left) = (at / self.run_bytes, at % self.run_bytes, len);
        if within > 0 {
            let piece = left.min(self.run_bytes - within);
            visit(self.offset_bytes(run) + within as isize, Copy2d::single(piece));
            (run, left) = (run + 1, left - piece);
        }
        let whole_runs = left / self.run_bytes;
        self.for_each_whole_copy(run, whole_runs, &mut visit);
        left -= whole_runs * self.run_bytes;
        if left > 0 {
            visit(self.offset_bytes(run + whole_runs), Copy2d::single(left));
        }
    }

    /// Returns the offset of a run from the first one.
    fn offset_bytes(&self, run: usize) -> isize {
        let mut rest = run;
        let mut offset_bytes = 0;
        for dim in self.dims.iter().rev() {
            offset_bytes += (rest % dim.count) as isize * dim.stride_bytes;
            rest /= dim.count;
        }
        offset_bytes
    }

    /// Calls `visit(offset, copy)` for `runs` runs from `first` on. A 2-D copy has one row, which may be part of the
    /// innermost dimension, or as many whole rows as possible before an outer dimension advances.
    fn for_each_whole_copy(&self, first: usize, runs: usize, mut visit: impl FnMut(isize, Copy2d)) {
        let mut copy = Copy2d::single(self.run_bytes);
        let Some((inner, outer)) = self.dims.split_last() else {
            // Without outer dimensions there is one run, copied whole or not at all.
            if runs > 0 {
                visit(0, copy);
            }
            return;
        };
        copy.columns.stride_bytes = inner.stride_bytes;
        copy.rows.stride_bytes = outer.last().map_or(0, |dim| dim.stride_bytes);
        let mut index = MultiIndex::new(outer, first / inner.count);
        let mut column = first % inner.count;
        let mut left = runs;
        while left > 0 {
            copy.columns.count = left.min(inner.count - column);
            let whole_rows = if column == 0 { left / inner.count } else { 1 };
            copy.rows.count = index.left_in_row().min(whole_rows).max(1);
            visit(index.offset_bytes + column as isize * inner.stride_bytes, copy);
            left -= copy.rows.count * copy.columns.count;
            index.advance(copy.rows.count);
            column = 0;
        }
    }
}
