//! What becomes of weights: what is done to a tensor, and what that makes of a part of it. Pure.

use std::num::NonZeroUsize;

use deepnvme_codec::pack::{BLOCK_ELEMENTS, encode, encoded_bytes_max};
use deepnvme_codec::quant::{Code, Scheme, quantise};
use deepnvme_codec::{Float, Result, cast};
use deepnvme_format::Dtype;

use crate::layer_group::{Arrival, CONVERSION_BYTES_MAX};

/// Decoded bytes of a part, about: who wants one row of an embedding reads that much, and a layer is cut there so that
/// several processors work on it.
const PART_BYTES: usize = 256 << 10;
/// Bytes that are read at once to be encoded, about.
const CHUNK_BYTES: usize = 16 << 20;
/// The type of scales: as good as fp16, and no weight is too small for it.
pub(super) const SCALES: Float = Float::Bf16;

/// What becomes of the weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mode {
    /// Packed without loss where that is measured to gain time, else kept.
    #[default]
    Auto,
    /// Packed without loss where that makes fewer bytes, however long decoding takes.
    Lossless,
    /// As they are.
    Keep,
    /// Floats are cast to that type.
    Cast(Float),
    /// Matrices are stored in eight bits, with a scale for each group of so many elements.
    Quantised(Code, usize),
}

/// What is done to a tensor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Recipe {
    /// Nothing.
    Keep,
    /// It is cast.
    Cast { from: Float, to: Float },
    /// It is packed without loss, in parts of so many elements.
    Pack { float: Float, part_elements: usize },
    /// It is quantised, in parts of so many rows.
    Quantise { float: Float, scheme: Scheme, columns: usize, part_rows: usize },
}

/// torch's types that are packed, cast and quantised.
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

impl Recipe {
    /// A float tensor packed without loss.
    pub(super) fn pack(float: Float, shape: &[u64]) -> Self {
        let columns = shape.last().map_or(1, |columns| *columns as usize).max(1);
        let room = PART_BYTES / float.bytes();
        // Whole rows, where a row is no larger than a part.
        let part_elements = if columns > room { room } else { room / columns * columns };
        Self::Pack { float, part_elements }
    }

    /// A matrix quantised; `None` for what has not two dimensions, or rows so long that no part has one.
    pub(super) fn quantise(code: Code, group: usize, float: Float, shape: &[u64]) -> Option<Self> {
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

    /// Bytes of a part of the source; the last of a tensor may have fewer.
    pub(super) fn part_bytes(&self, item_bytes: usize) -> usize {
        match self {
            Self::Keep | Self::Cast { .. } => PART_BYTES / item_bytes * item_bytes,
            Self::Pack { float, part_elements } => part_elements * float.bytes(),
            Self::Quantise { float, columns, part_rows, .. } => part_rows * columns * float.bytes(),
        }
    }

    /// Bytes of the source that are read at once: whole parts.
    pub(super) fn chunk_bytes(&self, item_bytes: usize) -> usize {
        let part = self.part_bytes(item_bytes);
        (CHUNK_BYTES / part).max(1) * part
    }

    /// The most bytes that so many bytes of one part become; all but `Pack` become exactly as many.
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

    /// What a part becomes.
    ///
    /// # Errors
    /// Where a weight has no code: an infinity, or no number.
    pub(super) fn encode(&self, part: &[u8]) -> Result<Vec<u8>> {
        match self {
            Self::Keep => Ok(part.to_vec()),
            Self::Cast { from, to } => {
                let mut made = vec![0; self.stored_bytes_max(part.len())];
                cast::convert(*from, *to, part, &mut made)?;
                Ok(made)
            }
            Self::Pack { float, .. } => {
                let mut made = Vec::with_capacity(self.stored_bytes_max(part.len()));
                part.chunks(BLOCK_ELEMENTS * float.bytes()).try_for_each(|block| encode(*float, block, &mut made))?;
                Ok(made)
            }
            Self::Quantise { float, scheme, columns, .. } => {
                let elements = part.len() / float.bytes();
                let mut made = vec![0; self.stored_bytes_max(part.len())];
                let scales_bytes = made.len() - elements;
                let (scales, codes) = made.split_at_mut(scales_bytes);
                quantise(*scheme, *columns, (*float, part), codes, scales)?;
                Ok(made)
            }
        }
    }

    /// How a row of its parts is decoded; `None` for what is no other form.
    pub(super) fn arrival(&self) -> Option<Arrival> {
        match *self {
            Self::Keep | Self::Cast { .. } => None,
            Self::Pack { .. } => Some(Arrival::Unpacked),
            Self::Quantise { float, scheme, columns, part_rows } => {
                Some(Arrival::Dequantised { scheme, columns, part_rows, to: float })
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
            let quantised = Recipe::quantise(Code::Int8, group, float, &shape).unwrap();
            let mut random = fastrand::Rng::with_seed(seed);
            for recipe in [Recipe::Keep, Recipe::Cast { from: float, to: Float::F32 }, Recipe::pack(float, &shape), quantised] {
                let part_bytes = recipe.part_bytes(float.bytes());
                prop_assert!(part_bytes > 0 && part_bytes <= PART_BYTES && part_bytes.is_multiple_of(float.bytes()));
                prop_assert!(recipe.chunk_bytes(float.bytes()).is_multiple_of(part_bytes));
                let bytes = part_bytes.min((rows * columns) as usize * float.bytes());
                // Numbers of a moderate size in any of the types.
                let part: Vec<u8> = (0..bytes / float.bytes()).flat_map(|_| {
                    let mut number = vec![0; float.bytes()];
                    let bits = (random.f32() - 0.5).to_le_bytes();
                    cast::convert(Float::F32, float, &bits, &mut number).unwrap();
                    number
                }).collect();
                let made = recipe.encode(&part).unwrap().len();
                let most = recipe.stored_bytes_max(part.len());
                prop_assert!(made == most || (made < most && recipe == Recipe::pack(float, &shape)));
            }
        }
    }

    #[test]
    fn what_is_no_matrix_is_not_quantised() {
        assert_eq!(Recipe::quantise(Code::Int8, 128, Float::Bf16, &[4096]), None);
        assert_eq!(Recipe::quantise(Code::Int8, 128, Float::Bf16, &[4, 0]), None);
        assert_eq!(Recipe::quantise(Code::Int8, 128, Float::F32, &[1, 1 << 30]), None);
        let wide = Recipe::pack(Float::Bf16, &[1, 1 << 30]);
        assert_eq!(wide.part_bytes(2), PART_BYTES);
    }
}
