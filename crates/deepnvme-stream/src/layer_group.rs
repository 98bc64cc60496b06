//! Layer groups, and the slots that they are loaded into.

use deepnvme_codec::Float;
use deepnvme_codec::quant::Scheme;
use deepnvme_file::aligned_range::AlignedRange;

use crate::error::{Error, Result};

/// The alignment of slots. If the offset within a page of memory equals the offset within a page of the file, direct
/// I/O needs no copy.
pub(crate) const SLOT_ALIGNMENT: usize = deepnvme_io::mem::PAGE_BYTES as usize;

/// A range of a file, and its place in the slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Index of the file.
    pub source: usize,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: usize,
    /// Offset in the slot.
    pub at: usize,
}

/// A range of a file that is decoded or cast on its way into the slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Conversion {
    /// Index of the file.
    pub source: usize,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Bytes on disk; at most [`CONVERSION_BYTES_MAX`].
    pub bytes: usize,
    /// Offset in the slot.
    pub at: usize,
    /// Bytes in memory; at most [`CONVERSION_BYTES_MAX`].
    pub target_bytes: usize,
    /// How the bytes are decoded.
    pub decoding: Decoding,
    /// Decoded bytes to drop at the front and at the end, if only some rows of an encoded part are needed.
    pub trim: (usize, usize),
    /// A cast after decoding: from and to.
    pub final_cast: Option<(Float, Float)>,
}

impl Conversion {
    /// Its range of the file, and of the buffer that it is read into.
    pub(crate) fn aligned_range(&self) -> AlignedRange {
        AlignedRange::new(self.offset, self.bytes)
    }

    /// Bytes to read for it: whole pages.
    pub(crate) fn read_bytes(&self) -> usize {
        self.aligned_range().page_span_bytes()
    }

    /// Bytes that `decoding` must produce, before trimming and casting. `None` if the sizes are inconsistent.
    pub(crate) fn decoded_bytes(&self) -> Option<usize> {
        let kept = match self.final_cast {
            None => self.target_bytes,
            Some((_, to)) if !self.target_bytes.is_multiple_of(to.bytes()) => return None,
            Some((from, to)) => (self.target_bytes / to.bytes()).checked_mul(from.bytes())?,
        };
        kept.checked_add(self.trim.0)?.checked_add(self.trim.1)
    }
}

/// How bytes on disk become elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Decoding {
    /// Cast from another float type.
    Cast {
        /// The type on disk.
        from: Float,
        /// The type in memory.
        to: Float,
    },
    /// Unpack losslessly packed floats, block by block (`deepnvme_codec::pack`).
    Unpack,
    /// Dequantise parts of whole rows each; a part has its scales, then its codes (`deepnvme_codec::quant`).
    Dequantise {
        /// The quantisation scheme.
        scheme: Scheme,
        /// Elements of a row.
        columns: usize,
        /// Rows of a part; the last may have fewer.
        part_rows: usize,
        /// The type in memory.
        to: Float,
    },
}

/// The largest conversion, on disk or in memory. Larger ranges are split, so that several threads share them and
/// buffers are bounded.
pub const CONVERSION_BYTES_MAX: usize = 16 << 20;

/// Weights that are fetched and used together, usually one layer.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LayerGroup {
    /// Index of its slot class.
    pub class: usize,
    /// Ranges that are read unchanged, by offset in the slot.
    pub pieces: Vec<Piece>,
    /// Ranges that are decoded, by offset in the slot. Nothing overlaps.
    pub conversions: Vec<Conversion>,
}

impl LayerGroup {
    /// Bytes of its ranges on disk.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let converted = self.conversions.iter().map(|conversion| conversion.bytes);
        self.pieces.iter().map(|piece| piece.bytes).chain(converted).map(|bytes| bytes as u64).sum()
    }

    /// The pieces and conversions in slot order: index, file, start and end in the slot. Indices below the number of
    /// pieces are pieces.
    pub(crate) fn placed_ranges(&self) -> Vec<(usize, usize, usize, usize)> {
        let pieces = self.pieces.iter().map(|piece| (piece.source, piece.at, piece.bytes));
        let conversions = self.conversions.iter().map(|each| (each.source, each.at, each.target_bytes));
        let numbered = pieces.chain(conversions).enumerate();
        let mut ranges: Vec<_> =
            numbered.map(|(index, (source, at, bytes))| (index, source, at, at.saturating_add(bytes))).collect();
        ranges.sort_unstable_by_key(|(_, _, from, to)| (*from, *to));
        ranges
    }
}

/// Equal slots for groups of about the same size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotClass {
    /// Number of slots; at least one.
    pub slots: usize,
    /// Groups that may be prefetched. Less than `slots`, unless the slots share memory with another class.
    pub prefetch: usize,
    /// Bytes of each slot, a multiple of 4096.
    pub slot_bytes: usize,
    /// Whether the slots begin where those of the previous class do, and take turns with them in the same memory. CPU
    /// only.
    pub shares_memory: bool,
}

/// The offset and the length of each slot in the arena.
pub(crate) fn layout(classes: &[SlotClass]) -> Vec<(usize, usize)> {
    let begins = begins(classes).map_or_else(Vec::new, |(begins, _)| begins);
    let of_class = |(class, begin): (&SlotClass, usize)| {
        let SlotClass { slots, slot_bytes, .. } = *class;
        (0..slots).map(move |slot| (begin + slot * slot_bytes, slot_bytes))
    };
    classes.iter().zip(begins).flat_map(of_class).collect()
}

/// The offset of each class, and the length of the arena; `None` on overflow.
fn begins(classes: &[SlotClass]) -> Option<(Vec<usize>, usize)> {
    let (mut begins, mut end) = (Vec::with_capacity(classes.len()), 0_usize);
    for class in classes {
        let begin = begins.last().copied().filter(|_| class.shares_memory).unwrap_or(end);
        begins.push(begin);
        end = class.slot_bytes.checked_mul(class.slots).and_then(|bytes| begin.checked_add(bytes))?.max(end);
    }
    Some((begins, end))
}

/// Checks that the groups fit the slots, and the slots the arena.
pub(crate) fn check(groups: &[LayerGroup], classes: &[SlotClass], sources: usize, arena_bytes: usize) -> Result<()> {
    let wrong = |what: String| Err(Error::Plan(what));
    for (index, class) in classes.iter().enumerate() {
        let is_shared = class.shares_memory || classes.get(index + 1).is_some_and(|next| next.shares_memory);
        let prefetch_max = if is_shared { class.slots } else { class.slots.saturating_sub(1) };
        if class.slots == 0 || class.prefetch > prefetch_max || !class.slot_bytes.is_multiple_of(SLOT_ALIGNMENT) {
            return wrong(format!(
                "class {index} has {} slots of {} bytes and prefetches {}: slot sizes must be multiples of {SLOT_ALIGNMENT}, \
                 and a class needs more slots than it prefetches (as many, if it shares memory)",
                class.slots, class.slot_bytes, class.prefetch
            ));
        }
    }
    let (_, total) = begins(classes).ok_or_else(|| Error::Plan("the slots are more than any memory".into()))?;
    if total != arena_bytes {
        return wrong(format!("{arena_bytes} bytes of memory for slots of {total}"));
    }
    for (index, group) in groups.iter().enumerate() {
        let Some(class) = classes.get(group.class) else {
            return wrong(format!("group {index} is of class {}, of {}", group.class, classes.len()));
        };
        let mut end = 0;
        for (number, source, from, to) in group.placed_ranges() {
            if from < end || to > class.slot_bytes || source >= sources {
                return wrong(format!(
                    "group {index} has range {number} of source {source} at {from} to {to}, behind {end}, in slots of {}",
                    class.slot_bytes
                ));
            }
            end = to;
        }
        let is_large = |each: &&Conversion| each.bytes.max(each.target_bytes) > CONVERSION_BYTES_MAX;
        if let Some(large) = group.conversions.iter().find(is_large) {
            return wrong(format!("group {index} has {large:?}, larger than {CONVERSION_BYTES_MAX} bytes"));
        }
    }
    Ok(())
}
