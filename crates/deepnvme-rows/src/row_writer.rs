//! Rows on their way into the caller's memory: copied, or converted.

use deepnvme_codec::{Float, Float8, cast};
use deepnvme_io::mem::RegionMut;

use crate::error::{Error, Result};
use crate::scales::RowScales;

/// The type of an element in the file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Element {
    /// A float of 16 or 32 bits.
    Float(Float),
    /// A float of 8 bits.
    Float8(Float8),
    /// A signed byte.
    Int8,
}

impl Element {
    /// Returns the bytes of one element.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::Float(float) => float.bytes(),
            Self::Float8(_) | Self::Int8 => 1,
        }
    }
}

/// The conversion of each row.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Conversion {
    /// The type of its elements in the file.
    pub from: Element,
    /// The type in memory.
    pub to: Float,
    /// A factor. Elements are multiplied by the row's scale, and then by this, in fp32.
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
    converter: Option<Converter<'a>>,
}

#[derive(Debug)]
struct Converter<'a> {
    conversion: Conversion,
    scales: Option<&'a RowScales>,
    /// Bytes of a row without scales behind it.
    element_bytes: usize,
    /// A row as fp32.
    wide: Vec<u8>,
    converted: Vec<u8>,
    factors: Vec<f32>,
}

impl<'a> RowWriter<'a> {
    /// # Errors
    /// `Invalid` if the memory has another size than this many rows, or a table with scales is not converted.
    pub(crate) fn new(
        target: &'a RegionMut,
        rows: usize,
        row_bytes: usize,
        conversion: Option<Conversion>,
        scales: Option<&'a RowScales>,
    ) -> Result<Self> {
        if scales.is_some() && conversion.is_none() {
            return Err(Error::Invalid("rows with scales are converted; say to which type".into()));
        }
        let element_bytes = scales.map_or(row_bytes, |scales| scales.element_bytes(row_bytes));
        let bytes = conversion.map_or(row_bytes, |conversion| conversion.bytes(element_bytes));
        if rows.checked_mul(bytes) != Some(target.len()) {
            let detail = format!("{rows} rows of {bytes} bytes do not fit {} bytes of memory exactly", target.len());
            return Err(Error::Invalid(detail));
        }
        let converter = conversion.map(|conversion| Converter {
            wide: vec![0; element_bytes / conversion.from.bytes() * Float::F32.bytes()],
            element_bytes,
            converted: vec![0; bytes],
            factors: vec![1.0; scales.map_or(1, RowScales::groups)],
            conversion,
            scales,
        });
        Ok(Self { target, row_bytes: bytes, converter })
    }

    /// Returns the bytes of a row in memory.
    pub(crate) fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Writes the row with this number to a position.
    pub(crate) fn put(&mut self, position: usize, row: u64, bytes: &[u8]) {
        let at = position * self.row_bytes;
        match &mut self.converter {
            None => self.target.copy_from_slice(at, bytes),
            Some(converter) => self.target.copy_from_slice(at, converter.convert(row, bytes)),
        }
    }
}

impl Converter<'_> {
    fn convert(&mut self, row: u64, record: &[u8]) -> &[u8] {
        let bytes = &record[..self.element_bytes];
        let Conversion { from, to, scale } = self.conversion;
        let done = match from {
            Element::Float(from) if scale.is_none() && self.scales.is_none() => {
                cast::convert(from, to, bytes, &mut self.converted)
            }
            _ => widen(from, bytes, &mut self.wide).and_then(|()| {
                self.multiply(row, record, scale);
                cast::convert(Float::F32, to, &self.wide, &mut self.converted)
            }),
        };
        // The sizes were derived from each other when this was created.
        debug_assert!(done.is_ok(), "{done:?}");
        &self.converted
    }

    /// Multiplies each group of the row by its factor.
    fn multiply(&mut self, row: u64, record: &[u8], scale: Option<f32>) {
        self.factors.fill(1.0);
        if let Some(scales) = self.scales {
            scales.copy(row, record, &mut self.factors);
        }
        let elements = self.wide.as_chunks_mut().0;
        let group = elements.len().div_ceil(self.factors.len()).max(1);
        for (group, factor) in elements.chunks_mut(group).zip(&self.factors) {
            for element in group {
                let scaled = f32::from_le_bytes(*element) * factor;
                *element = scale.map_or(scaled, |scale| scaled * scale).to_le_bytes();
            }
        }
    }
}

/// Converts elements to fp32, exactly.
fn widen(from: Element, bytes: &[u8], wide: &mut [u8]) -> deepnvme_codec::Result<()> {
    let value = |code: u8| match from {
        Element::Float8(float) => float.values()[usize::from(code)],
        _ => f32::from(code as i8),
    };
    match from {
        Element::Float(float) => return cast::convert(float, Float::F32, bytes, wide),
        Element::Float8(_) | Element::Int8 => {
            for (element, code) in wide.as_chunks_mut().0.iter_mut().zip(bytes) {
                *element = value(*code).to_le_bytes();
            }
        }
    }
    Ok(())
}
