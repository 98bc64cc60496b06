//! A block and its elements again.

use super::elements::{join, other_bytes};
use super::header::{Header, Layer};
use super::lanes::{Lanes, Task, WINDOW, widely};
use super::{GROUP, HEADER_BYTES, LAYER_BYTES, LAYERS_MAX, PLANES_BYTES};
use crate::{Error, Result};

/// Elements whose exponents are put together before the elements are: both stay in the first cache.
const STEP: usize = 32 * GROUP;

/// A block whose sizes are known to be true. Its codes are checked when it is decoded.
#[derive(Clone, Copy, Debug)]
pub struct Block<'a> {
    header: Header,
    layers: [Option<Layer>; LAYERS_MAX],
    /// What stands behind the description: everything else, the planes of the layers, the tail.
    others: &'a [u8],
    planes: &'a [u8],
    tail: &'a [u8],
}

/// Memory for decoding, at most twice the elements of a block, to be used again for the next block.
#[derive(Debug, Default)]
pub struct Scratch {
    from: Vec<u8>,
    to: Vec<u8>,
}

impl<'a> Block<'a> {
    /// Reads the block that `bytes` begin with; what is behind it is not looked at. The next one begins after
    /// [`Header::encoded_bytes`].
    ///
    /// # Errors
    ///
    /// [`Error::Corrupt`] where the bytes are too few, or contradict each other.
    pub fn parse(bytes: &'a [u8]) -> Result<Self> {
        let header = Header::parse(bytes)?;
        let Some(bytes) = bytes.get(..header.encoded_bytes) else {
            let len = bytes.len();
            return Err(Error::corrupt(12, format!("{len} bytes, where {} are promised", header.encoded_bytes)));
        };
        let mut layers = [None; LAYERS_MAX];
        let (mut offset, mut left, mut planes_bytes) = (HEADER_BYTES, header.elements, 0);
        for place in layers.iter_mut().take(header.layers) {
            let Some(bytes) = bytes[offset..].first_chunk::<LAYER_BYTES>() else {
                return Err(Error::corrupt(offset, "the block ends within the description of its layers"));
            };
            let layer = place.insert(Layer::parse(bytes, left, offset)?);
            (left, planes_bytes) = (layer.rest, planes_bytes + layer.planes_bytes());
            offset += LAYER_BYTES;
        }
        if header.layers == 0 {
            return Ok(Self { header, layers, others: &bytes[offset..], planes: &[], tail: &[] });
        }
        let others_bytes = other_bytes(header.float, header.elements);
        let expected = offset + others_bytes + planes_bytes + left;
        if expected != bytes.len() {
            let what = format!("layers that take {expected} bytes, where {} are promised", bytes.len());
            return Err(Error::corrupt(HEADER_BYTES, what));
        }
        let (others, rest) = bytes[offset..].split_at(others_bytes);
        let (planes, tail) = rest.split_at(planes_bytes);
        Ok(Self { header, layers, others, planes, tail })
    }

    /// What the block says about itself.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Whether the elements are stored as they are.
    #[must_use]
    pub fn is_raw(&self) -> bool {
        self.header.layers == 0
    }

    /// Decodes all elements. Use [`Block::decode_with`] for many blocks.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] where `out` has not [`Header::decoded_bytes`]; [`Error::Corrupt`] where codes and layers
    /// contradict each other, and `out` has any bytes then.
    pub fn decode_into(&self, out: &mut [u8]) -> Result<()> {
        self.decode_with(&mut Scratch::default(), out)
    }

    /// The same with memory that is kept from block to block.
    ///
    /// # Errors
    ///
    /// As [`Block::decode_into`].
    pub fn decode_with(&self, scratch: &mut Scratch, out: &mut [u8]) -> Result<()> {
        if out.len() != self.header.decoded_bytes() {
            let (len, bytes) = (out.len(), self.header.decoded_bytes());
            return Err(Error::invalid(format!("room for {len} bytes, where the block has {bytes}")));
        }
        if self.is_raw() {
            out.copy_from_slice(self.others);
            return Ok(());
        }
        let decoded = widely(Decode { block: self, scratch, out });
        decoded.ok_or_else(|| {
            Error::corrupt(HEADER_BYTES, "codes of a layer and the size of the next contradict each other")
        })
    }
}

struct Decode<'a> {
    block: &'a Block<'a>,
    scratch: &'a mut Scratch,
    out: &'a mut [u8],
}

impl Task for Decode<'_> {
    type Output = Option<()>;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> Option<()> {
        let Self { block, scratch: Scratch { from, to }, out } = self;
        let Header { float, elements, .. } = block.header;
        let mut planes = block.planes;
        let (first, deeper) = block.layers.split_first()?;
        grow(from, block.tail.len() + WINDOW)[..block.tail.len()].copy_from_slice(block.tail);
        for layer in deeper.iter().rev().flatten() {
            let (others, own) = planes.split_at_checked(planes.len().checked_sub(layer.planes_bytes())?)?;
            planes = others;
            let room = grow(to, layer.elements.next_multiple_of(GROUP) + WINDOW);
            let mut next = Next { bytes: from.get(..layer.rest + WINDOW)?, taken: 0 };
            spread(lanes, layer, own, &mut next, room)?;
            next.finish()?;
            std::mem::swap(from, to);
        }
        let first = (*first)?;
        let mut next = Next { bytes: from.get(..first.rest + WINDOW)?, taken: 0 };
        let mut exponents = [0; STEP];
        let steps = out.chunks_mut(STEP * float.bytes()).zip(planes.chunks(STEP / GROUP * PLANES_BYTES));
        for (index, (out, planes)) in steps.enumerate() {
            let step = Layer { elements: out.len() / float.bytes(), ..first };
            spread(lanes, &step, planes, &mut next, &mut exponents)?;
            join(lanes, float, (&exponents[..step.elements], block.others), (index * STEP, elements), out);
        }
        next.finish()
    }
}

/// The symbols of the layer below, as they are asked for; [`WINDOW`] bytes behind the last may be anything.
struct Next<'a> {
    bytes: &'a [u8],
    taken: usize,
}

impl Next<'_> {
    /// Whether all were asked for, and no more.
    fn finish(self) -> Option<()> {
        (self.taken + WINDOW == self.bytes.len()).then_some(())
    }
}

/// All symbols of a layer; `None` where more are asked for than there are, or what fills up the last group is not zero.
#[inline(always)]
fn spread(lanes: impl Lanes, layer: &Layer, planes: &[u8], next: &mut Next<'_>, out: &mut [u8]) -> Option<()> {
    let mut last = 0;
    for (planes, out) in planes.as_chunks::<PLANES_BYTES>().0.iter().zip(out.as_chunks_mut::<GROUP>().0) {
        let (low, high) = (word(planes, 0), word(planes, 8));
        let window = next.bytes.get(next.taken..)?.first_chunk()?;
        lanes.spread(low, high, layer.symbols, window, out);
        next.taken += (low & high).count_ones() as usize;
        last = low | high;
    }
    let used = layer.elements % GROUP;
    (used == 0 || last >> used == 0).then_some(())
}

#[inline(always)]
fn word(planes: &[u8; PLANES_BYTES], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|index| planes[at + index]))
}

/// At least so many bytes, whatever they are.
fn grow(bytes: &mut Vec<u8>, len: usize) -> &mut [u8] {
    if bytes.len() < len {
        bytes.resize(len, 0);
    }
    &mut bytes[..len]
}
