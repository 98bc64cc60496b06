//! Rows on their way into the caller's memory: copied, or converted.

use deepnvme_codec::{Float, cast};
use deepnvme_io::mem::RegionMut;

use crate::error::{Error, Result};

/// The conversion of each row.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Conversion {
    /// The type of its elements in the file.
    pub from: Float,
    /// The type in memory.
    pub to: Float,
    /// A factor. The product is rounded once, to the type in memory.
    pub scale: Option<f32>,
}

impl Conversion {
    /// Returns the bytes of a converted row.
    #[must_use]
    pub fn bytes(&self, row_bytes: usize) -> usize {
        row_bytes / self.from.bytes() * self.to.bytes()
    }
}

/// Writes rows to their positions in contiguous memory.
#[derive(Debug)]
pub(crate) struct RowWriter<'a> {
    target: &'a RegionMut,
    row_bytes: usize,
    conversion: Option<Conversion>,
    /// A row as fp32, and a converted row.
    scratch: (Vec<u8>, Vec<u8>),
}

impl<'a> RowWriter<'a> {
    /// # Errors
    /// `Invalid` if the memory has another size than this many rows.
    pub(crate) fn new(
        target: &'a RegionMut,
        rows: usize,
        row_bytes: usize,
        conversion: Option<Conversion>,
    ) -> Result<Self> {
        let bytes = conversion.map_or(row_bytes, |conversion| conversion.bytes(row_bytes));
        if rows.checked_mul(bytes) != Some(target.len()) {
            let detail = format!("{rows} rows of {bytes} bytes do not fit {} bytes of memory exactly", target.len());
            return Err(Error::Invalid(detail));
        }
        let scratch = conversion.map_or((Vec::new(), Vec::new()), |conversion| {
            (vec![0; row_bytes / conversion.from.bytes() * Float::F32.bytes()], vec![0; bytes])
        });
        Ok(Self { target, row_bytes: bytes, conversion, scratch })
    }

    /// Writes a row to a position.
    pub(crate) fn put(&mut self, position: usize, row: &[u8]) {
        let at = position * self.row_bytes;
        let Some(Conversion { from, to, scale }) = self.conversion else {
            self.target.copy_from_slice(at, row);
            return;
        };
        let (wide, converted) = &mut self.scratch;
        let done = match scale {
            None => cast::convert(from, to, row, converted),
            Some(scale) => cast::convert(from, Float::F32, row, wide).and_then(|()| {
                for element in wide.as_chunks_mut().0 {
                    *element = (f32::from_le_bytes(*element) * scale).to_le_bytes();
                }
                cast::convert(Float::F32, to, wide, converted)
            }),
        };
        // The sizes were derived from each other when this was created.
        debug_assert!(done.is_ok(), "{done:?}");
        self.target.copy_from_slice(at, converted);
    }
}
