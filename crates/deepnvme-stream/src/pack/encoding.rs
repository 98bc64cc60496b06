//! How each tensor is encoded. This module does no I/O.

use std::num::NonZeroUsize;

use deepnvme_codec::pack::{BLOCK_ELEMENTS, encode, encoded_bytes_max};
use deepnvme_codec::quant::{CodeType, Scheme, quantise};
use deepnvme_codec::{Float, Result, cast};
use deepnvme_format::Dtype;

use crate::layer_group::{CONVERSION_BYTES_MAX, Decoding};

/// The approximate decoded size of a part. One row of an embedding reads this much, and several threads can share a
/// layer.
const PART_BYTES: usize = 256 << 10;
/// The approximate number of bytes read and encoded at once.
const CHUNK_BYTES: usize = 16 << 20;
/// The type of scales. Codes are relative to the rounded scale, so a short mantissa costs little accuracy. Scales of
/// fp16 would underflow.
pub(super) const SCALES: Float = Float::Bf16;

/// The encoding of the weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum EncodingMode {
    /// Pack losslessly if that is measured to save time; otherwise keep.
    #[default]
    Auto,
    /// Pack losslessly if that saves more than a few percent of the bytes, however long decoding takes.
    Lossless,
    /// Keep unchanged.
    Keep,
    /// Cast floats to this type.
    Cast(Float),
    /// Quantise matrices to eight bits, with a scale for each group of this many elements (0: for each row).
    Quantised(CodeType, usize),
}

/// The encoding of one tensor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Encoding {
    /// Unchanged.
    Keep,
    /// Cast.
    Cast { from: Float, to: Float },
    /// Packed losslessly, in parts of this many elements.
    Pack { float: Float, part_elements: usize },
    /// Quantised, in parts of this many rows.
    Quantise { float: Float, scheme: Scheme, columns: usize, part_rows: usize },
}

/// The types that can be packed, cast and quantised.
pub(super) fn float(dtype: Dtype) -> Option<Float> {
    match dtype {
        Dtype::Bf16 => Some(Float::Bf16),
        Dtype::F16 => Some(Float::F16),
        Dtype::F32 => Some(Float::F32),
        _ => None,
    }
}

pub(super) fn dtype(float: Float) -> Dtype {
    match float {
        Float::Bf16 => Dtype::Bf16,
        Float::F16 => Dtype::F16,
        Float::F32 => Dtype::F32,
    }
}

impl Encoding {
    /// Returns the lossless encoding of a float tensor.
    pub(super) fn pack(float: Float, shape: &[u64]) -> Self {
        let columns = shape.last().map_or(1, |columns| *columns as usize).max(1);
        let elements_max = PART_BYTES / float.bytes();
        // Whole rows, if a row fits into a part.
        let part_elements = if columns > elements_max { elements_max } else { elements_max / columns * columns };
        Self::Pack { float, part_elements }
    }

    /// Returns the encoding that quantises a matrix. `None` for other shapes, and for rows that are too long for a
    /// conversion.
    pub(super) fn quantise(code: CodeType, group: usize, float: Float, shape: &[u64]) -> Option<Self> {
        let columns = *shape.last()? as usize;
        let row_bytes = columns.checked_mul(float.bytes())?;
        if shape.len() < 2 || columns == 0 || row_bytes > CONVERSION_BYTES_MAX / 2 {
            return None;
        }
        let scheme = Scheme { code, group: NonZeroUsize::new(group), scale: SCALES };
        Some(Self::Quantise { float, scheme, columns, part_rows: (PART_BYTES / row_bytes).max(1) })
    }

    pub(super) fn is_encoded(&self) -> bool {
        matches!(self, Self::Pack { .. } | Self::Quantise { .. })
    }

    /// Bytes of a part of the source; the last part may have fewer.
    pub(super) fn part_bytes(&self, item_bytes: usize) -> usize {
        match self {
            Self::Keep | Self::Cast { .. } => PART_BYTES / item_bytes * item_bytes,
            Self::Pack { float, part_elements } => part_elements * float.bytes(),
            Self::Quantise { float, columns, part_rows, .. } => part_rows * columns * float.bytes(),
        }
    }

    /// Bytes of the source to read at once: whole parts.
    pub(super) fn chunk_bytes(&self, item_bytes: usize) -> usize {
        let part = self.part_bytes(item_bytes);
        (CHUNK_BYTES / part).max(1) * part
    }

    /// The maximum stored bytes of part of a tensor; exact for all encodings but `Pack`.
    pub(super) fn stored_bytes_max(&self, bytes: usize) -> usize {
        match self {
            Self::Keep => bytes,
            Self::Cast { from, to } => bytes / from.bytes() * to.bytes(),
            Self::Pack { float, .. } => {
                let blocks = bytes.div_ceil(BLOCK_ELEMENTS * float.bytes());
                bytes + blocks * (encoded_bytes_max(0))
            }
            Self::Quantise { float, scheme, columns, .. } => {
                let rows = bytes / float.bytes() / columns;
                scheme.scales(rows, *columns).unwrap_or(0) * scheme.scale.bytes() + rows * columns
            }
        }
    }

    /// Encodes a part.
    ///
    /// # Errors
    /// If quantisation cannot represent a weight: it is infinite or NaN, or its scale is too large.
    pub(super) fn encode(&self, part: &[u8]) -> Result<Vec<u8>> {
        match self {
            Self::Keep => Ok(part.to_vec()),
            Self::Cast { from, to } => {
                let mut encoded = vec![0; self.stored_bytes_max(part.len())];
                cast::convert(*from, *to, part, &mut encoded)?;
                Ok(encoded)
            }
            Self::Pack { float, .. } => {
                let mut encoded = Vec::with_capacity(self.stored_bytes_max(part.len()));
                part.chunks(BLOCK_ELEMENTS * float.bytes())
                    .try_for_each(|block| encode(*float, block, &mut encoded))?;
                Ok(encoded)
            }
            Self::Quantise { float, scheme, columns, .. } => {
                let elements = part.len() / float.bytes();
                let mut encoded = vec![0; self.stored_bytes_max(part.len())];
                let scales_bytes = encoded.len() - elements;
                let (scales, codes) = encoded.split_at_mut(scales_bytes);
                quantise(*scheme, *columns, (*float, part), codes, scales)?;
                Ok(encoded)
            }
        }
    }

    /// How its parts are decoded; `None` if they are plain elements.
    pub(super) fn decoding(&self) -> Option<Decoding> {
        match *self {
            Self::Keep | Self::Cast { .. } => None,
            Self::Pack { .. } => Some(Decoding::Unpack),
            Self::Quantise { float, scheme, columns, part_rows } => {
                Some(Decoding::Dequantise { scheme, columns, part_rows, to: float })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn parts_are_whole_and_no_larger_than_promised(
            float in proptest::sample::select(&Float::ALL[..]), rows in 1..400u64, columns in 1..9000u64, group in 1..300usize,
            seed: u64,
        ) {
            let shape = [rows, columns];
            let quantised = Encoding::quantise(CodeType::Int8, group, float, &shape).unwrap();
            let mut random = fastrand::Rng::with_seed(seed);
            for encoding in [Encoding::Keep, Encoding::Cast { from: float, to: Float::F32 }, Encoding::pack(float, &shape), quantised] {
                let part_bytes = encoding.part_bytes(float.bytes());
                prop_assert!(part_bytes > 0 && part_bytes <= PART_BYTES && part_bytes.is_multiple_of(float.bytes()));
                prop_assert!(encoding.chunk_bytes(float.bytes()).is_multiple_of(part_bytes));
                let bytes = part_bytes.min((rows * columns) as usize * float.bytes());
                // Moderate numbers, which every type can represent.
                let part: Vec<u8> = (0..bytes / float.bytes()).flat_map(|_| {
                    let mut number = vec![0; float.bytes()];
                    let bits = (random.f32() - 0.5).to_le_bytes();
                    cast::convert(Float::F32, float, &bits, &mut number).unwrap();
                    number
                }).collect();
                let encoded = encoding.encode(&part).unwrap().len();
                let most = encoding.stored_bytes_max(part.len());
                prop_assert!(encoded == most || (encoded < most && encoding == Encoding::pack(float, &shape)));
            }
        }
    }

    #[test]
    fn only_matrices_are_quantised() {
        assert_eq!(Encoding::quantise(CodeType::Int8, 128, Float::Bf16, &[4096]), None);
        assert_eq!(Encoding::quantise(CodeType::Int8, 128, Float::Bf16, &[4, 0]), None);
        assert_eq!(Encoding::quantise(CodeType::Int8, 128, Float::F32, &[1, 1 << 30]), None);
        let wide = Encoding::pack(Float::Bf16, &[1, 1 << 30]);
        assert_eq!(wide.part_bytes(2), PART_BYTES);
    }
}
