//! Decodes and casts weights, from their bytes on disk to their bytes in memory. This module does no I/O.

use std::ops::Range;

use deepnvme_codec::pack::{PackedBlock, Scratch};
use deepnvme_codec::quant::Scheme;
use deepnvme_codec::{Error, Float, Result, cast, quant};

use crate::layer_group::{Conversion, Decoding};

/// Bytes per step of casts and of whole rows, so that each step stays in the L2 cache. Packed blocks are steps of their
/// own size.
const STEP_BYTES: usize = 256 << 10;

/// Memory that conversions reuse.
#[derive(Debug, Default)]
pub(crate) struct Workspace {
    scratch: Scratch,
    step: Vec<u8>,
    last: Vec<u8>,
}

/// Converts one range of a file, and calls `put(offset in the target, bytes)` for each step.
///
/// # Errors
/// If the bytes are invalid, or `put` fails.
pub(crate) fn convert<E: From<Error>>(
    conversion: &Conversion,
    source: &[u8],
    workspace: &mut Workspace,
    mut put: impl FnMut(usize, &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let Conversion { decoding, target_bytes, trim: (front, back), final_cast, .. } = *conversion;
    let Workspace { scratch, step, last } = workspace;
    let misfit = || Error::Invalid(format!("{} bytes do not become {target_bytes} ({decoding:?})", source.len()));
    let Some(whole) = conversion.decoded_bytes() else { return Err(misfit().into()) };
    if final_cast.is_some_and(|(from, _)| !front.is_multiple_of(from.bytes())) {
        return Err(misfit().into());
    }
    let window = front..whole - back;
    let encoded = Encoded { bytes: source, decoded_bytes: whole, window: window.clone() };
    // Trims each step to the requested rows, and casts it.
    let put = |at: usize, bytes: &[u8]| {
        let (from, to) = (at.max(window.start), (at + bytes.len()).min(window.end));
        if from >= to {
            return Ok(());
        }
        let (place, part) = (from - window.start, &bytes[from - at..to - at]);
        let Some((from, to)) = final_cast else { return put(place, part) };
        last.resize(part.len() / from.bytes() * to.bytes(), 0);
        cast::convert(from, to, part, last)?;
        put(place / from.bytes() * to.bytes(), last)
    };
    let is_whole = match decoding {
        Decoding::Cast { from, to } => cast_floats((from, to), &encoded, step, put)?,
        Decoding::Unpack => unpack(&encoded, (scratch, step), put)?,
        Decoding::Dequantise { scheme, columns, part_rows, to } => {
            dequantise((scheme, columns, part_rows, to), &encoded, step, put)?
        }
    };
    if is_whole { Ok(()) } else { Err(misfit().into()) }
}

/// The bytes of a tensor on disk.
struct Encoded<'a> {
    bytes: &'a [u8],
    /// Their number when they are decoded, if they are valid.
    decoded_bytes: usize,
    /// The wanted range of the decoded bytes.
    window: Range<usize>,
}

/// Casts floats. Returns whether they become exactly the expected number of bytes, as the next two functions do.
fn cast_floats<E: From<Error>>(
    (from, to): (Float, Float),
    encoded: &Encoded<'_>,
    step: &mut Vec<u8>,
    mut put: impl FnMut(usize, &[u8]) -> Result<(), E>,
) -> Result<bool, E> {
    let Encoded { bytes, decoded_bytes, .. } = *encoded;
    let elements = bytes.len() / from.bytes();
    if elements * to.bytes() != decoded_bytes || elements * from.bytes() != bytes.len() {
        return Ok(false);
    }
    let mut at = 0;
    for part in bytes.chunks(STEP_BYTES / to.bytes() * from.bytes()) {
        step.resize(part.len() / from.bytes() * to.bytes(), 0);
        cast::convert(from, to, part, step)?;
        put(at, step)?;
        at += step.len();
    }
    Ok(true)
}

/// Unpacks the blocks that overlap the window.
fn unpack<E: From<Error>>(
    encoded: &Encoded<'_>,
    (scratch, step): (&mut Scratch, &mut Vec<u8>),
    mut put: impl FnMut(usize, &[u8]) -> Result<(), E>,
) -> Result<bool, E> {
    let Encoded { window, decoded_bytes, .. } = encoded;
    let (mut rest, mut at) = (encoded.bytes, 0);
    while !rest.is_empty() {
        let block = PackedBlock::parse(rest)?;
        let bytes = block.header().decoded_bytes();
        if bytes > decoded_bytes - at {
            return Ok(false);
        }
        if at < window.end && at + bytes > window.start {
            step.resize(bytes, 0);
            block.decode_with(scratch, step)?;
            put(at, step)?;
        }
        at += bytes;
        rest = &rest[block.header().encoded_bytes()..];
    }
    Ok(at == *decoded_bytes)
}

/// Dequantises the rows that overlap the window. Each part of the source has scales, then codes.
fn dequantise<E: From<Error>>(
    (scheme, columns, part_rows, to): (Scheme, usize, usize, Float),
    encoded: &Encoded<'_>,
    step: &mut Vec<u8>,
    mut put: impl FnMut(usize, &[u8]) -> Result<(), E>,
) -> Result<bool, E> {
    let Encoded { window, decoded_bytes, .. } = encoded;
    let row_bytes = columns.saturating_mul(to.bytes()).max(1);
    let rows = decoded_bytes / row_bytes;
    if columns == 0 || part_rows == 0 || rows * row_bytes != *decoded_bytes {
        return Ok(false);
    }
    let rows_at_once = (STEP_BYTES / row_bytes).max(1);
    let (mut rest, mut first) = (encoded.bytes, 0);
    while first < rows {
        let part = part_rows.min(rows - first);
        let scales_bytes = scheme.scales(part, columns).and_then(|scales| scales.checked_mul(scheme.scale.bytes()));
        let sizes = scales_bytes.zip(part.checked_mul(columns));
        let Some((scales_bytes, _)) = sizes.filter(|(scales, codes)| scales.saturating_add(*codes) <= rest.len())
        else {
            return Ok(false);
        };
        let (scales, after) = rest.split_at(scales_bytes);
        let (codes, after) = after.split_at(part * columns);
        let scale_bytes = scales_bytes / part;
        // Only the requested rows.
        let begin = (window.start / row_bytes).clamp(first, first + part) - first;
        let end = window.end.div_ceil(row_bytes).clamp(first, first + part) - first;
        let mut row = begin;
        while row < end {
            let until = end.min(row + rows_at_once);
            step.resize((until - row) * row_bytes, 0);
            let scales = &scales[row * scale_bytes..until * scale_bytes];
            quant::dequantise(scheme, columns, &codes[row * columns..until * columns], scales, (to, step))?;
            put((first + row) * row_bytes, step)?;
            row = until;
        }
        (rest, first) = (after, first + part);
    }
    Ok(rest.is_empty())
}

#[cfg(test)]
mod tests {
    use deepnvme_codec::quant::{CodeType, Scheme};
    use deepnvme_codec::{Float, pack};
    use proptest::prelude::*;

    use super::*;

    fn decoded(decoding: Decoding, source: &[u8], target_bytes: usize) -> Result<Vec<u8>> {
        trimmed(decoding, source, target_bytes, (0, 0), None)
    }

    fn trimmed(
        decoding: Decoding,
        source: &[u8],
        target_bytes: usize,
        trim: (usize, usize),
        final_cast: Option<(Float, Float)>,
    ) -> Result<Vec<u8>> {
        let mut target = Vec::new();
        let put = |at: usize, bytes: &[u8]| {
            assert_eq!(at, target.len(), "step by step");
            target.extend_from_slice(bytes);
            Ok::<(), Error>(())
        };
        let bytes = source.len();
        let conversion = Conversion { source: 0, offset: 0, bytes, at: 0, target_bytes, decoding, trim, final_cast };
        convert(&conversion, source, &mut Workspace::default(), put)?;
        Ok(target)
    }

    fn weights(count: usize, seed: u64) -> Vec<u8> {
        let mut random = fastrand::Rng::with_seed(seed);
        let one = |random: &mut fastrand::Rng| {
            let value = (random.f32() + random.f32() + random.f32() - 1.5) * 0.05;
            ((value.to_bits() >> 16) as u16).to_le_bytes()
        };
        (0..count).flat_map(|_| one(&mut random)).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn packed_weights_decode_exactly(count in 0..400_000usize, seed: u64) {
            let bytes = weights(count, seed);
            let mut packed = Vec::new();
            for block in bytes.chunks(2 * pack::BLOCK_ELEMENTS) {
                pack::encode(Float::Bf16, block, &mut packed).unwrap();
            }
            prop_assert_eq!(&decoded(Decoding::Unpack, &packed, bytes.len()).unwrap(), &bytes);
            if !bytes.is_empty() {
                prop_assert!(decoded(Decoding::Unpack, &packed, bytes.len() - 1).is_err());
                prop_assert!(decoded(Decoding::Unpack, &packed, bytes.len() + 1).is_err());
                prop_assert!(decoded(Decoding::Unpack, &packed[..packed.len() - 1], bytes.len()).is_err());
            }
        }

        #[test]
        fn casts_and_quantised_rows_equal_the_whole(
            rows in 1..300usize, columns in 1..3000usize, group in proptest::option::of(1..200usize), seed: u64,
        ) {
            let bytes = weights(rows * columns, seed);
            let mut whole = vec![0; bytes.len() * 2];
            cast::convert(Float::Bf16, Float::F32, &bytes, &mut whole).unwrap();
            let cast = Decoding::Cast { from: Float::Bf16, to: Float::F32 };
            prop_assert!(decoded(cast, &bytes, whole.len()).unwrap() == whole);
            prop_assert!(decoded(cast, &bytes, whole.len() + 4).is_err());

            let group = group.and_then(std::num::NonZeroUsize::new);
            let scheme = Scheme { code: CodeType::Int8, group, scale: Float::F32 };
            let scales_bytes = scheme.scales(rows, columns).unwrap() * 4;
            let mut stored = vec![0; scales_bytes + rows * columns];
            let (scales, codes) = stored.split_at_mut(scales_bytes);
            quant::quantise(scheme, columns, (Float::Bf16, &bytes), codes, scales).unwrap();
            let mut expected = vec![0; bytes.len()];
            quant::dequantise(scheme, columns, codes, scales, (Float::Bf16, &mut expected)).unwrap();
            let decoding = Decoding::Dequantise { scheme, columns, part_rows: rows, to: Float::Bf16 };
            prop_assert!(decoded(decoding, &stored, expected.len()).unwrap() == expected);
            prop_assert!(decoded(decoding, &stored[1..], expected.len()).is_err());
        }

        #[test]
        fn some_rows_equal_those_of_the_whole(
            rows in 1..200usize, columns in 1..900usize, part_rows in 1..70usize, cut in (any::<u16>(), any::<u16>()), seed: u64,
            is_cast: bool,
        ) {
            let bytes = weights(rows * columns, seed);
            let (front, behind) = (cut.0 as usize % rows, cut.1 as usize % rows);
            prop_assume!(front + behind < rows);
            let scheme = Scheme { code: CodeType::F8E4m3, group: std::num::NonZeroUsize::new(50), scale: Float::Bf16 };
            let (mut packed, mut quantised, mut expected) = (Vec::new(), Vec::new(), Vec::new());
            for part in bytes.chunks(part_rows * columns * 2) {
                pack::encode(Float::Bf16, part, &mut packed).unwrap();
                let part_rows = part.len() / 2 / columns;
                let (mut codes, mut scales) = (vec![0; part.len() / 2], vec![0; scheme.scales(part_rows, columns).unwrap() * 2]);
                quant::quantise(scheme, columns, (Float::Bf16, part), &mut codes, &mut scales).unwrap();
                let mut again = vec![0; part.len()];
                quant::dequantise(scheme, columns, &codes, &scales, (Float::Bf16, &mut again)).unwrap();
                expected.extend(again);
                quantised.extend([scales, codes].concat());
            }
            let trim = (front * columns * 2, behind * columns * 2);
            let then = is_cast.then_some((Float::Bf16, Float::F32));
            let decoding = Decoding::Dequantise { scheme, columns, part_rows, to: Float::Bf16 };
            for (decoding, stored, whole) in [(Decoding::Unpack, &packed, &bytes), (decoding, &quantised, &expected)] {
                let mut wanted = whole[trim.0..whole.len() - trim.1].to_vec();
                if is_cast {
                    let short = std::mem::take(&mut wanted);
                    wanted = vec![0; short.len() * 2];
                    cast::convert(Float::Bf16, Float::F32, &short, &mut wanted).unwrap();
                }
                prop_assert!(trimmed(decoding, stored, wanted.len(), trim, then).unwrap() == wanted);
                prop_assert!(trimmed(decoding, stored, wanted.len(), (trim.0, trim.1 + 2), then).is_err());
            }
        }
    }
}
