//! Tensors whose form on disk differs from memory, and the conversions that load any range of one. This module does no
//! I/O.

use std::ops::Range;

use deepnvme_codec::Float;

use crate::error::{Error, Result};
use crate::layer_group::{CONVERSION_BYTES_MAX, Conversion, Decoding};

/// The usual size limit of a conversion, on disk and in memory: small enough for several threads to share a group, and
/// to finish soon after the last read.
const CONVERSION_BYTES_TARGET: usize = 4 << 20;

/// A tensor on disk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoredTensor {
    /// Index of its file.
    pub source: usize,
    /// The type of its elements, after decoding.
    pub float: Float,
    /// Its form on disk.
    pub form: Form,
}

/// The form of a tensor on disk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Form {
    /// Plain elements, which are cast.
    Plain {
        /// Offset in the file.
        offset: u64,
    },
    /// Consecutive parts, each decoded by itself.
    Parts {
        /// The offset of each part, and the end of the last one.
        starts: Vec<u64>,
        /// Decoded bytes of each part; the last may have fewer.
        part_bytes: usize,
        /// Decoded bytes of all parts.
        bytes: usize,
        /// How the parts are decoded.
        decoding: Decoding,
    },
}

impl StoredTensor {
    /// Checks that the parts are consistent, and that each fits into one conversion.
    ///
    /// # Errors
    /// `Plan`, with the reason.
    pub fn check(&self) -> Result<()> {
        let Form::Parts { starts, part_bytes, bytes, .. } = &self.form else { return Ok(()) };
        let wrong = |what: &str| Err(Error::Plan(format!("the parts of a tensor {what}")));
        if *part_bytes == 0 || *part_bytes > CONVERSION_BYTES_MAX || !part_bytes.is_multiple_of(self.float.bytes()) {
            return wrong("are empty, too large, or not whole elements");
        }
        if bytes.div_ceil(*part_bytes) + 1 != starts.len() || !bytes.is_multiple_of(self.float.bytes()) {
            return wrong("do not match its size");
        }
        let fits = |pair: &[u64]| {
            pair[1].checked_sub(pair[0]).is_some_and(|stored| (1..=CONVERSION_BYTES_MAX as u64).contains(&stored))
        };
        if starts.windows(2).all(fits) { Ok(()) } else { wrong("overlap, or have a size that none may have") }
    }

    /// Checks that a range may end at this decoded byte.
    ///
    /// # Errors
    /// As [`conversions`](Self::conversions).
    pub fn check_end(&self, end: usize) -> Result<()> {
        self.check_range(&(end..end))
    }

    fn check_range(&self, range: &Range<usize>) -> Result<()> {
        let item = self.float.bytes();
        let is_whole = range.start.is_multiple_of(item) && range.end.is_multiple_of(item) && range.start <= range.end;
        let has = match &self.form {
            Form::Plain { .. } => true,
            Form::Parts { bytes, .. } => range.end <= *bytes,
        };
        if is_whole && has {
            return Ok(());
        }
        Err(Error::Plan(format!("bytes {range:?} lie outside a tensor of {:?}", self.float)))
    }

    /// The conversions that load a range of its decoded bytes to the slot offset `at`, as elements of `to`.
    ///
    /// # Errors
    /// `Plan` for a range that cuts an element, or lies outside a tensor of `Parts`. A plain tensor has no length here.
    pub fn conversions(&self, range: Range<usize>, at: usize, to: Float) -> Result<Vec<Conversion>> {
        self.check_range(&range)?;
        let item = self.float.bytes();
        let becomes = |bytes: usize| bytes / item * to.bytes();
        let mut conversions = Vec::new();
        let mut begin = range.start;
        while begin < range.end {
            let place = at + becomes(begin - range.start);
            let conversion = match &self.form {
                Form::Plain { offset } => {
                    let elements = CONVERSION_BYTES_TARGET / item.max(to.bytes());
                    let bytes = (elements * item).min(range.end - begin);
                    Conversion {
                        source: self.source,
                        offset: offset + begin as u64,
                        bytes,
                        at: place,
                        target_bytes: becomes(bytes),
                        decoding: Decoding::Cast { from: self.float, to },
                        trim: (0, 0),
                        final_cast: None,
                    }
                }
                Form::Parts { starts, part_bytes, bytes, decoding } => {
                    let first = begin / part_bytes;
                    let last = together(starts, *part_bytes, first, range.end.div_ceil(*part_bytes), &becomes);
                    let (from, end) = (first * part_bytes, (last * part_bytes).min(*bytes));
                    let until = end.min(range.end);
                    Conversion {
                        source: self.source,
                        offset: starts[first],
                        bytes: (starts[last] - starts[first]) as usize,
                        at: place,
                        target_bytes: becomes(until - begin),
                        decoding: *decoding,
                        trim: (begin - from, end - until),
                        final_cast: (to != self.float).then_some((self.float, to)),
                    }
                }
            };
            begin += conversion.target_bytes / to.bytes() * item;
            conversions.push(conversion);
        }
        Ok(conversions)
    }
}

/// The end of the parts for one conversion: at least one part, and no more than the usual size limit.
fn together(starts: &[u64], part_bytes: usize, first: usize, end: usize, becomes: &impl Fn(usize) -> usize) -> usize {
    let mut last = first + 1;
    while last < end {
        let stored = (starts[last + 1] - starts[first]) as usize;
        let decoded = (last + 1 - first) * part_bytes;
        if stored.max(decoded).max(becomes(decoded)) > CONVERSION_BYTES_TARGET {
            break;
        }
        last += 1;
    }
    last
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn conversions_cover_a_range_once_and_stay_small(
            sizes in proptest::collection::vec(1..3_000_000u64, 1..12), part_elements in 1..2_000_000usize, short: u32,
            cut in (any::<u32>(), any::<u32>()), is_plain: bool, is_wider: bool,
        ) {
            let part_bytes = part_elements * 2;
            let bytes = part_bytes * sizes.len() - 2 * (short as usize % part_elements);
            let mut starts = vec![77];
            sizes.iter().for_each(|size| starts.push(starts.last().unwrap() + size));
            let form = if is_plain {
                Form::Plain { offset: 77 }
            } else {
                Form::Parts { starts: starts.clone(), part_bytes, bytes, decoding: Decoding::Unpack }
            };
            let stored = StoredTensor { source: 3, float: Float::Bf16, form };
            stored.check().unwrap();
            let (one, other) = (cut.0 as usize % (bytes / 2) * 2, cut.1 as usize % (bytes / 2 + 1) * 2);
            let range = one.min(other)..one.max(other);
            let to = if is_wider { Float::F32 } else { Float::F16 };
            let mut at = 4096;
            let mut begin = range.start;
            for each in stored.conversions(range.clone(), 4096, to).unwrap() {
                prop_assert_eq!((each.source, each.at), (3, at));
                prop_assert!(each.target_bytes > 0 && each.bytes.max(each.target_bytes) <= CONVERSION_BYTES_MAX);
                let kept = each.target_bytes / to.bytes() * 2;
                if is_plain {
                    prop_assert_eq!((each.offset, each.bytes), (77 + begin as u64, kept));
                } else {
                    // Whole parts, trimmed at both ends.
                    let first = starts.iter().position(|start| *start == each.offset).unwrap();
                    let last = starts.iter().position(|start| *start == each.offset + each.bytes as u64).unwrap();
                    prop_assert_eq!(first * part_bytes + each.trim.0, begin);
                    prop_assert_eq!((last * part_bytes).min(bytes) - each.trim.1, begin + kept);
                    prop_assert_eq!(each.decoded_bytes().unwrap(), (last * part_bytes).min(bytes) - first * part_bytes);
                }
                at += each.target_bytes;
                begin += kept;
            }
            prop_assert_eq!(begin, range.end);
        }
    }

    #[test]
    fn inconsistent_parts_are_refused() {
        let parts = |starts: Vec<u64>, part_bytes, bytes| {
            let form = Form::Parts { starts, part_bytes, bytes, decoding: Decoding::Unpack };
            StoredTensor { source: 0, float: Float::Bf16, form }
        };
        assert!(parts(vec![0, 10, 20], 16, 30).check().is_ok());
        for (starts, part_bytes, bytes) in [
            (vec![0, 10], 16, 30),
            (vec![0, 10, 9], 16, 30),
            (vec![0, 10, 10], 16, 30),
            (vec![0, 10, 20], 15, 30),
            (vec![0, 10, 20], 16, 31),
            (vec![0, 10, 20 + CONVERSION_BYTES_MAX as u64], 16, 30),
            (vec![0], 0, 0),
        ] {
            assert!(parts(starts.clone(), part_bytes, bytes).check().is_err(), "{starts:?}");
        }
        assert!(parts(vec![0, 10, 20], 16, 30).conversions(0..32, 0, Float::F32).is_err());
        assert!(parts(vec![0, 10, 20], 16, 30).conversions(1..4, 0, Float::F32).is_err());
    }
}
