//! What is streamed: units, their pieces, and the slots that they pass through.

use deepnvme_codec::Float;
use deepnvme_codec::quant::Scheme;

use crate::error::{Error, Result};
use crate::residency::Class;

/// Slots begin at, and are, multiples of this: bytes that lie at the same place within a page of memory as within a page of
/// their file get there without a copy.
pub(crate) const SLOT_ALIGNMENT: usize = deepnvme_io::mem::PAGE_BYTES as usize;

/// Direct I/O begins at such a place, in the file and in memory.
pub(crate) const BLOCK_BYTES: u64 = deepnvme_io::mem::PAGE_BYTES;

/// A stretch of a file, and where in the slot it goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Which of the sources.
    pub source: usize,
    /// Where in it, in bytes.
    pub offset: u64,
    /// How many bytes.
    pub bytes: usize,
    /// Where in the slot.
    pub at: usize,
}

/// A stretch of a file whose bytes become others on their way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Conversion {
    /// Which of the sources.
    pub source: usize,
    /// Where in it, in bytes.
    pub offset: u64,
    /// How many bytes there; at most [`CONVERSION_BYTES_MAX`].
    pub bytes: usize,
    /// Where in the slot.
    pub at: usize,
    /// How many bytes they become; at most [`CONVERSION_BYTES_MAX`].
    pub target_bytes: usize,
    /// What is done to them.
    pub arrival: Arrival,
    /// How many of the bytes that they become then are left out, in front and behind: who wants some rows of what was packed
    /// together.
    pub trim: (usize, usize),
    /// The type that those are cast from and to in the end.
    pub then: Option<(Float, Float)>,
}

impl Conversion {
    /// Bytes in front of it in its first block.
    pub(crate) fn head(&self) -> usize {
        (self.offset % BLOCK_BYTES) as usize
    }

    /// Bytes of memory that it is read into: whole blocks.
    pub(crate) fn read_bytes(&self) -> usize {
        (self.head() + self.bytes).next_multiple_of(BLOCK_BYTES as usize)
    }

    /// How many bytes come out of `arrival`, with what is left out; `None` where no type has so many.
    pub(crate) fn decoded_bytes(&self) -> Option<usize> {
        let kept = match self.then {
            None => self.target_bytes,
            Some((_, to)) if !self.target_bytes.is_multiple_of(to.bytes()) => return None,
            Some((from, to)) => (self.target_bytes / to.bytes()).checked_mul(from.bytes())?,
        };
        kept.checked_add(self.trim.0)?.checked_add(self.trim.1)
    }
}

/// What bytes become when they arrive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arrival {
    /// Floats of another type.
    Cast {
        /// On disk.
        from: Float,
        /// In memory.
        to: Float,
    },
    /// What they were before they were packed: `deepnvme_codec::pack`, block by block.
    Unpacked,
    /// Floats, out of parts of so many rows, each its scales and then its codes: `deepnvme_codec::quant`.
    Dequantised {
        /// How they were quantised.
        scheme: Scheme,
        /// Elements of a row.
        columns: usize,
        /// Rows of a part; the last one may have fewer.
        part_rows: usize,
        /// In memory.
        to: Float,
    },
}

/// A conversion has no more bytes than this, on disk or in memory: larger ones are cut, so that several processors work on
/// them, and so that the memory for them has a bound.
pub const CONVERSION_BYTES_MAX: usize = 16 << 20;

/// What is fetched and used together.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Unit {
    /// Which slots it passes through.
    pub class: usize,
    /// What arrives as it is, by where it goes.
    pub pieces: Vec<Piece>,
    /// What becomes other bytes, by where it goes. Nothing overlaps.
    pub conversions: Vec<Conversion>,
}

impl Unit {
    /// Bytes that are read for it.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let converted = self.conversions.iter().map(|conversion| conversion.bytes);
        self.pieces.iter().map(|piece| piece.bytes).chain(converted).map(|bytes| bytes as u64).sum()
    }

    /// Which source each part needs, and where in the slot it begins and ends, in the order of the slot. Those with an index
    /// below the number of pieces are pieces.
    pub(crate) fn parts(&self) -> Vec<(usize, usize, usize, usize)> {
        let pieces = self.pieces.iter().map(|piece| (piece.source, piece.at, piece.bytes));
        let conversions = self.conversions.iter().map(|each| (each.source, each.at, each.target_bytes));
        let numbered = pieces.chain(conversions).enumerate();
        let mut parts: Vec<_> =
            numbered.map(|(index, (source, at, bytes))| (index, source, at, at.saturating_add(bytes))).collect();
        parts.sort_unstable_by_key(|(_, _, from, to)| (*from, *to));
        parts
    }
}

/// Equal slots for units of about the same size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotClass {
    /// How many. At least one.
    pub slots: usize,
    /// Units that may be fetched before they are called for; less than `slots`, unless their memory is another class's, too.
    pub ahead: usize,
    /// Bytes of each, a multiple of 4096.
    pub slot_bytes: usize,
    /// They begin where those of the class before begin, and have the same memory by turns. On the host only.
    pub shares: bool,
}

impl From<&SlotClass> for Class {
    fn from(class: &SlotClass) -> Self {
        Self { slots: class.slots, ahead: class.ahead }
    }
}

/// Where each slot begins in the arena, and how long that is.
pub(crate) fn layout(classes: &[SlotClass]) -> Vec<(usize, usize)> {
    let begins = begins(classes).map_or_else(Vec::new, |(begins, _)| begins);
    let of_class = |(class, begin): (&SlotClass, usize)| {
        let SlotClass { slots, slot_bytes, .. } = *class;
        (0..slots).map(move |slot| (begin + slot * slot_bytes, slot_bytes))
    };
    classes.iter().zip(begins).flat_map(of_class).collect()
}

/// Where the slots of each class begin, and how long the arena has to be; `None` where that is more than any memory.
fn begins(classes: &[SlotClass]) -> Option<(Vec<usize>, usize)> {
    let (mut begins, mut end) = (Vec::with_capacity(classes.len()), 0_usize);
    for class in classes {
        let begin = begins.last().copied().filter(|_| class.shares).unwrap_or(end);
        begins.push(begin);
        end = class.slot_bytes.checked_mul(class.slots).and_then(|bytes| begin.checked_add(bytes))?.max(end);
    }
    Some((begins, end))
}

/// Refuses a plan that would not fit itself.
pub(crate) fn check(units: &[Unit], classes: &[SlotClass], sources: usize, arena_bytes: usize) -> Result<()> {
    let wrong = |what: String| Err(Error::Plan(what));
    for (index, class) in classes.iter().enumerate() {
        let is_shared = class.shares || classes.get(index + 1).is_some_and(|next| next.shares);
        let ahead_max = if is_shared { class.slots } else { class.slots.saturating_sub(1) };
        if class.slots == 0 || class.ahead > ahead_max || !class.slot_bytes.is_multiple_of(SLOT_ALIGNMENT) {
            return wrong(format!(
                "class {index} has {} slots of {} bytes, {} ahead; slots are multiples of {SLOT_ALIGNMENT}, more than ahead",
                class.slots, class.slot_bytes, class.ahead
            ));
        }
    }
    let (_, total) = begins(classes).ok_or_else(|| Error::Plan("the slots are more than any memory".into()))?;
    if total != arena_bytes {
        return wrong(format!("{arena_bytes} bytes of memory for slots of {total}"));
    }
    for (index, unit) in units.iter().enumerate() {
        let Some(class) = classes.get(unit.class) else {
            return wrong(format!("unit {index} is of class {}, of {}", unit.class, classes.len()));
        };
        let mut end = 0;
        for (part, source, from, to) in unit.parts() {
            if from < end || to > class.slot_bytes || source >= sources {
                return wrong(format!(
                    "unit {index} has part {part} of source {source} at {from} to {to}, behind {end}, in slots of {}",
                    class.slot_bytes
                ));
            }
            end = to;
        }
        let is_large = |each: &&Conversion| each.bytes.max(each.target_bytes) > CONVERSION_BYTES_MAX;
        if let Some(large) = unit.conversions.iter().find(is_large) {
            return wrong(format!("unit {index} has {large:?}, larger than {CONVERSION_BYTES_MAX} bytes"));
        }
    }
    Ok(())
}
