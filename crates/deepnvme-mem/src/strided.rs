//! The layout of a strided tensor.

use std::io;

/// The maximum number of dimensions, as in torch and numpy.
pub const DIMS_MAX: usize = 64;

/// The byte layout of a strided tensor. Its flat order is row-major: the last dimension varies fastest.
///
/// ```
/// use deepnvme_mem::Strided;
/// // The transpose of a 2 x 3 matrix of 4-byte items: three rows of two items each.
/// let transposed = Strided::new(vec![3, 2], vec![4, 12], 4)?;
/// assert_eq!(transposed.total_bytes(), 24);
/// assert!(!transposed.may_overlap());
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Strided {
    /// Items along each dimension. An empty shape is a single item.
    pub shape: Vec<usize>,
    /// Bytes from one item to the next along each dimension. May be negative or zero.
    pub stride_bytes: Vec<isize>,
    /// Bytes of one item.
    pub item_bytes: usize,
}

impl Strided {
    /// Creates a checked layout.
    ///
    /// # Errors
    /// `InvalidInput` if [`Strided::check`] rejects it.
    pub fn new(shape: Vec<usize>, stride_bytes: Vec<isize>, item_bytes: usize) -> io::Result<Self> {
        let layout = Self { shape, stride_bytes, item_bytes };
        layout.check()?;
        Ok(layout)
    }

    /// Creates the checked layout of contiguous, row-major items.
    ///
    /// # Errors
    /// `InvalidInput` if [`Strided::check`] rejects it.
    pub fn contiguous(shape: Vec<usize>, item_bytes: usize) -> io::Result<Self> {
        let mut stride_bytes = vec![0; shape.len()];
        let mut bytes = item_bytes;
        for (stride, count) in stride_bytes.iter_mut().zip(&shape).rev() {
            // The check refuses what does not fit, except for empty tensors, which use no stride.
            *stride = isize::try_from(bytes).unwrap_or(isize::MAX);
            bytes = bytes.saturating_mul((*count).max(1));
        }
        Self::new(shape, stride_bytes, item_bytes)
    }

    /// Checks that the layout is consistent and fits an address space.
    ///
    /// # Errors
    /// `InvalidInput` if shape and strides differ in length, there are more than [`DIMS_MAX`] dimensions, an item has
    /// no bytes, or the elements or the distance between two of them exceed `isize::MAX` bytes.
    pub fn check(&self) -> io::Result<()> {
        let refuse = |message: String| Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        let (dims, strides) = (self.shape.len(), self.stride_bytes.len());
        if dims != strides {
            return refuse(format!("a shape of {dims} dimensions has {strides} strides; give one for each"));
        }
        if dims > DIMS_MAX {
            return refuse(format!("{dims} dimensions are more than {DIMS_MAX}"));
        }
        if self.item_bytes == 0 {
            return refuse("an item needs at least one byte".to_owned());
        }
        if self.total_bytes() > isize::MAX as usize {
            return refuse(format!("shape {:?} of {}-byte items exceeds any memory", self.shape, self.item_bytes));
        }
        if self.total_bytes() > 0 && self.span_bytes().is_none() {
            return refuse(format!("strides {:?} of shape {:?} exceed any memory", self.stride_bytes, self.shape));
        }
        Ok(())
    }

    /// Returns the bytes of all elements, `usize::MAX` on overflow.
    #[must_use]
    pub fn total_bytes(&self) -> usize {
        if self.shape.contains(&0) {
            return 0;
        }
        self.shape.iter().fold(self.item_bytes, |bytes, count| bytes.saturating_mul(*count))
    }

    /// Returns whether two different indices may share a byte.
    ///
    /// `false` is certain. `true` is certain except for tensors whose dimensions interleave without one spanning the
    /// other, which no slicing, transposing or flipping of an ordinary tensor produces.
    #[must_use]
    pub fn may_overlap(&self) -> bool {
        if self.total_bytes() == 0 {
            return false;
        }
        let mut dims: Vec<(usize, usize)> =
            self.wide_dims().map(|(count, stride)| (stride.unsigned_abs(), count)).collect();
        dims.sort_unstable();
        // From the smallest stride up, each must step over the whole span of the smaller ones.
        let mut span_bytes = self.item_bytes;
        for (stride, count) in dims {
            if stride < span_bytes {
                return true;
            }
            span_bytes = stride.saturating_mul(count - 1).saturating_add(span_bytes);
        }
        false
    }

    /// Returns the bytes from the lowest address of any element to the end of the highest.
    fn span_bytes(&self) -> Option<usize> {
        let mut span_bytes = self.item_bytes;
        for (count, stride) in self.wide_dims() {
            span_bytes = stride.unsigned_abs().checked_mul(count - 1)?.checked_add(span_bytes)?;
        }
        (span_bytes <= isize::MAX as usize).then_some(span_bytes)
    }

    /// Returns the bytes that the elements of a checked layout occupy below the first element's address, and from it
    /// on.
    pub(crate) fn bytes_around_first(&self) -> (usize, usize) {
        let (mut below_bytes, mut above_bytes) = (0, self.item_bytes);
        for (count, stride) in self.wide_dims() {
            let span_bytes = stride.unsigned_abs() * (count - 1);
            if stride < 0 {
                below_bytes += span_bytes;
            } else {
                above_bytes += span_bytes;
            }
        }
        (below_bytes, above_bytes)
    }

    /// Returns count and stride of the dimensions with at least two items. The others never use their stride.
    pub(crate) fn wide_dims(&self) -> impl DoubleEndedIterator<Item = (usize, isize)> {
        let dims = self.shape.iter().copied().zip(self.stride_bytes.iter().copied());
        dims.filter(|(count, _)| *count > 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(shape: &[usize], stride_bytes: &[isize], item_bytes: usize) -> Strided {
        Strided::new(shape.to_vec(), stride_bytes.to_vec(), item_bytes).unwrap()
    }

    #[test]
    fn ordinary_views_do_not_overlap() {
        assert!(!layout(&[], &[], 8).may_overlap());
        assert!(!layout(&[4, 5], &[20, 4], 4).may_overlap());
        assert!(!layout(&[5, 4], &[4, 20], 4).may_overlap(), "a transpose");
        assert!(!layout(&[4, 5], &[-20, -4], 4).may_overlap(), "flipped both ways");
        assert!(!layout(&[4, 2], &[40, 8], 4).may_overlap(), "every second column");
        assert!(!layout(&[1, 5], &[0, 4], 4).may_overlap(), "the stride of a single item is unused");
        assert!(!layout(&[0, 5], &[0, 0], 4).may_overlap(), "nothing overlaps nothing");
    }

    #[test]
    fn overlaps_are_found() {
        assert!(layout(&[3, 5], &[0, 4], 4).may_overlap(), "expanded");
        assert!(layout(&[4, 3], &[4, 4], 4).may_overlap(), "a sliding window");
        assert!(layout(&[4], &[2], 4).may_overlap(), "items that lap over the next");
        assert!(layout(&[2, 2], &[4, -4], 4).may_overlap(), "(0, 0) and (1, 1)");
    }

    #[test]
    fn invalid_layouts_are_refused_with_a_reason() {
        let refused = |shape: &[usize], strides: &[isize], item| {
            let error = Strided::new(shape.to_vec(), strides.to_vec(), item).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
            error.to_string()
        };
        assert!(refused(&[2, 2], &[1], 1).contains("give one for each"));
        assert!(refused(&[1; 65], &[1; 65], 1).contains("more than 64"));
        assert!(refused(&[2], &[1], 0).contains("at least one byte"));
        assert!(refused(&[usize::MAX, 3], &[0, 0], 1).contains("exceeds any memory"));
        assert!(refused(&[2, 2], &[isize::MAX, isize::MIN], 1).contains("strides"));
        assert!(layout(&[usize::MAX, 0], &[isize::MAX, 3], 9).check().is_ok(), "an empty tensor reaches nowhere");
    }

    #[test]
    fn total_bytes_counts_elements_not_memory() {
        assert_eq!(layout(&[3, 5], &[0, 4], 4).total_bytes(), 60);
        assert_eq!(layout(&[], &[], 16).total_bytes(), 16);
        assert_eq!(layout(&[7, 0], &[4, 4], 4).total_bytes(), 0);
    }
}
