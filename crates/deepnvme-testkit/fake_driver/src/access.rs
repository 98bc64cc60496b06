//! The bytes that an op accesses: a range, or rows with a pitch.

/// Rows of `width` bytes with a `pitch`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) pitch: u64,
    pub(crate) width: u64,
    pub(crate) height: u64,
}

impl Shape {
    /// One row.
    pub(crate) fn line(bytes: usize) -> Self {
        Self { pitch: bytes as u64, width: bytes as u64, height: 1 }
    }

    /// Returns the bytes from the first to the last; `None` on overflow.
    pub(crate) fn extent(self) -> Option<u64> {
        if self.width == 0 || self.height == 0 {
            return Some(0);
        }
        self.pitch.checked_mul(self.height - 1)?.checked_add(self.width)
    }
}

/// An access to memory. Device and host addresses never coincide, so an address is enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Access {
    pub(crate) start: u64,
    pub(crate) shape: Shape,
    pub(crate) writes: bool,
}

impl Access {
    /// Creates an access to one range.
    pub(crate) fn line(start: u64, bytes: usize, writes: bool) -> Self {
        Self { start, shape: Shape::line(bytes), writes }
    }

    fn extent(&self) -> u64 {
        self.shape.extent().unwrap_or(u64::MAX)
    }

    fn end(&self) -> u64 {
        self.start.saturating_add(self.extent())
    }

    /// Returns whether two accesses must be ordered.
    pub(crate) fn conflicts(&self, other: &Self) -> bool {
        (self.writes || other.writes) && self.overlaps(other)
    }

    /// Returns whether two accesses share a byte. Exact: interleaved rows share none.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        if self.extent() == 0 || other.extent() == 0 || self.start >= other.end() || other.start >= self.end() {
            return false;
        }
        let (few, many) = if self.shape.height <= other.shape.height { (self, other) } else { (other, self) };
        (0..few.shape.height).any(|row| many.touches(few.start + row * few.shape.pitch, few.shape.width))
    }

    /// Returns whether a row includes a byte of the range: the first row that ends after its start decides.
    fn touches(&self, start: u64, bytes: u64) -> bool {
        let Shape { pitch, width, height } = self.shape;
        if height == 1 || pitch == 0 {
            return self.start < start + bytes && start < self.start + width;
        }
        let row = (start + 1).saturating_sub(self.start + width).div_ceil(pitch);
        row < height && self.start + row * pitch < start + bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    fn bytes_of(of: &Access) -> Vec<u64> {
        let shape = of.shape;
        (0..shape.height).flat_map(|row| (0..shape.width).map(move |x| of.start + row * shape.pitch + x)).collect()
    }

    #[test]
    fn overlap_agrees_with_a_list_of_all_bytes() {
        let mut rng = Rng::keyed(3, 4);
        let mut draw = || {
            let width = rng.below(6);
            let shape = Shape { pitch: width + rng.below(6), width, height: rng.below(5) };
            Access { start: rng.below(40), shape, writes: rng.below(2) == 0 }
        };
        for _ in 0..20_000 {
            let (a, b) = (draw(), draw());
            let (left, right) = (bytes_of(&a), bytes_of(&b));
            let common = left.iter().any(|byte| right.contains(byte));
            assert_eq!(a.overlaps(&b), common, "{a:?} {b:?}");
            assert_eq!(a.conflicts(&b), common && (a.writes || b.writes));
        }
    }

    #[test]
    fn an_extent_that_no_machine_has_is_none() {
        assert_eq!(Shape { pitch: u64::MAX, width: 1, height: 3 }.extent(), None);
        assert_eq!(Shape { pitch: 10, width: 4, height: 3 }.extent(), Some(24));
    }
}
