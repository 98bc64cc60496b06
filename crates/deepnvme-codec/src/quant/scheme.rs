//! Quantisation schemes and their sizes.

use std::num::NonZeroUsize;

use crate::{Error, Float, Result};

/// The 8-bit type of codes, as which weights are stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CodeType {
    /// A signed 8-bit integer from -127 to 127: uniform steps.
    Int8,
    /// torch's `float8_e4m3fn`: 4 exponent bits, 3 mantissa bits, up to 448. Small weights keep more precision, large
    /// ones less.
    F8E4m3,
}

/// A quantisation scheme.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Scheme {
    /// The type of the codes.
    pub code: CodeType,
    /// Elements of a row that share a scale; `None` for the whole row. 64 and 128 are usual.
    pub group: Option<NonZeroUsize>,
    /// The type of the scales.
    pub scale: Float,
}

impl Scheme {
    /// Returns the number of scales of a matrix, `None` on overflow.
    #[must_use]
    pub fn scales(&self, rows: usize, columns: usize) -> Option<usize> {
        let each = if columns == 0 { 0 } else { columns.div_ceil(self.group_of(columns)) };
        rows.checked_mul(each)
    }

    /// Returns the elements of a group for rows of that length, at least one.
    pub(super) fn group_of(&self, columns: usize) -> usize {
        self.group.map_or(columns, NonZeroUsize::get).clamp(1, columns.max(1))
    }

    /// Checks that the slices fit each other, given their bytes.
    pub(super) fn check(
        &self,
        columns: usize,
        (float, float_bytes): (Float, usize),
        codes_bytes: usize,
        scales_bytes: usize,
    ) -> Result<()> {
        let rows = codes_bytes.checked_div(columns).unwrap_or(0);
        let whole = rows * columns == codes_bytes;
        let elements = codes_bytes.checked_mul(float.bytes()) == Some(float_bytes);
        let expected = self.scales(rows, columns).and_then(|scales| scales.checked_mul(self.scale.bytes()));
        if whole && elements && expected == Some(scales_bytes) {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "{float_bytes} bytes of {float:?}, {codes_bytes} codes and {scales_bytes} bytes of scales do not match rows of \
             {columns} elements in {self:?}"
        )))
    }
}
