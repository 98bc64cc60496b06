//! A multi-index over the outer dimensions of a strided layout.

use crate::strided::DIMS_MAX;

/// One dimension.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Dim {
    pub(crate) count: usize,
    pub(crate) stride_bytes: isize,
}

impl Dim {
    /// Returns the bytes from the first item to the position after the last one.
    pub(crate) fn span_bytes(self) -> Option<isize> {
        self.stride_bytes.checked_mul(isize::try_from(self.count).ok()?)
    }
}

/// An index for each dimension, and the byte offset of the item at these indices. The last dimension varies fastest.
pub(crate) struct MultiIndex<'a> {
    dims: &'a [Dim],
    at: [usize; DIMS_MAX],
    /// Bytes from the item at index zero to the current one.
    pub(crate) offset_bytes: isize,
}

impl<'a> MultiIndex<'a> {
    /// Starts at the item with the flat index `first`.
    pub(crate) fn new(dims: &'a [Dim], first: usize) -> Self {
        let (mut at, mut offset_bytes, mut rest) = ([0; DIMS_MAX], 0, first);
        for (dim, index) in dims.iter().zip(&mut at[..dims.len()]).rev() {
            (*index, rest) = (rest % dim.count, rest / dim.count);
            offset_bytes += *index as isize * dim.stride_bytes;
        }
        Self { dims, at, offset_bytes }
    }

    /// Returns the items left in the last dimension, the current one included. 1 without dimensions.
    pub(crate) fn left_in_row(&self) -> usize {
        self.dims.last().map_or(1, |dim| dim.count - self.at[self.dims.len() - 1])
    }

    /// Advances by `items`, which is at most [`left_in_row`](Self::left_in_row). After the last item it starts again.
    pub(crate) fn advance(&mut self, items: usize) {
        debug_assert!(items <= self.left_in_row(), "{items} items reach beyond the row");
        let mut step = items;
        for (dim, index) in self.dims.iter().zip(&mut self.at[..self.dims.len()]).rev() {
            *index += step;
            // One past the end the offset may wrap around. Subtracting the whole dimension undoes that.
            self.offset_bytes = self.offset_bytes.wrapping_add(dim.stride_bytes.wrapping_mul(step as isize));
            if *index < dim.count {
                return;
            }
            *index = 0;
            self.offset_bytes = self.offset_bytes.wrapping_sub(dim.stride_bytes.wrapping_mul(dim.count as isize));
            step = 1;
        }
    }
}
