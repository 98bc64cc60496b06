//! Counting through the dimensions around the runs.

use crate::strided::DIMS_MAX;

/// One dimension.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Dim {
    pub(crate) count: usize,
    pub(crate) stride_bytes: isize,
}

impl Dim {
    /// Bytes from the first item to where the item after the last one would be.
    pub(crate) fn span_bytes(self) -> Option<isize> {
        self.stride_bytes.checked_mul(isize::try_from(self.count).ok()?)
    }
}

/// An index in some dimensions, and the offset that belongs to it. The last dimension turns fastest.
pub(crate) struct Odometer<'a> {
    dims: &'a [Dim],
    at: [usize; DIMS_MAX],
    /// Bytes from the item at index zero to the one at the present index.
    pub(crate) offset_bytes: isize,
}

impl<'a> Odometer<'a> {
    /// At the item with the flat number `first`.
    pub(crate) fn new(dims: &'a [Dim], first: usize) -> Self {
        let (mut at, mut offset_bytes, mut rest) = ([0; DIMS_MAX], 0, first);
        for (dim, index) in dims.iter().zip(&mut at[..dims.len()]).rev() {
            (*index, rest) = (rest % dim.count, rest / dim.count);
            offset_bytes += *index as isize * dim.stride_bytes;
        }
        Self { dims, at, offset_bytes }
    }

    /// Items from here to the end of the last dimension; 1 without dimensions.
    pub(crate) fn ahead(&self) -> usize {
        self.dims.last().map_or(1, |dim| dim.count - self.at[self.dims.len() - 1])
    }

    /// Moves on by `items`, which do not go past the end of the last dimension. Past the last item it starts again.
    pub(crate) fn advance(&mut self, items: usize) {
        let mut step = items;
        for (dim, index) in self.dims.iter().zip(&mut self.at[..self.dims.len()]).rev() {
            *index += step;
            // One past the end the offset may wrap around; taking the whole dimension back unwraps it.
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
