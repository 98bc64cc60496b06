//! How weights are quantised, and how many bytes that takes.

use std::num::NonZeroUsize;

use crate::{Error, Float, Result};

/// What a weight becomes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Code {
    /// A signed integer of eight bits, -127 to 127: steps of the same size.
    Int8,
    /// torch's `float8_e4m3fn`: four bits of exponent, three of mantissa, up to 448. Small weights keep more of
    /// themselves, large ones less.
    F8E4m3,
}

/// How weights are quantised.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Scheme {
    /// What a weight becomes.
    pub code: Code,
    /// Elements along a row that share a scale; `None` for the whole row. 64 and 128 are usual.
    pub group: Option<NonZeroUsize>,
    /// The type of the scales.
    pub scale: Float,
}

impl Scheme {
    /// How many scales there are for a matrix of so many rows and columns; `None` where nobody could count them.
    #[must_use]
    pub fn scales(&self, rows: usize, columns: usize) -> Option<usize> {
        let each = if columns == 0 { 0 } else { columns.div_ceil(self.group_of(columns)) };
        rows.checked_mul(each)
    }

    /// Elements of a group in rows of that length, at least one.
    pub(super) fn group_of(&self, columns: usize) -> usize {
        self.group.map_or(columns, NonZeroUsize::get).clamp(1, columns.max(1))
    }

    /// Whether the slices fit each other, given their bytes.
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
            "{float_bytes} bytes of {float:?}, {codes_bytes} codes and {scales_bytes} bytes of scales do not belong to rows of \
             {columns} elements in {self:?}"
        )))
    }
}
