//! Decoding of one block.

use super::elements::{assemble, sign_mantissa_bytes};
use super::header::{BlockHeader, Layer};
use super::simd::{GroupCodec, SimdTask, WINDOW, dispatch};
use super::{GROUP, HEADER_BYTES, LAYER_BYTES, LAYERS_MAX, PLANES_BYTES};
use crate::{Error, Result};

/// Elements whose exponents are decoded before the elements are assembled: both stay in the L1 cache.
const STEP: usize = 32 * GROUP;

/// A block with validated sizes. Its codes are validated when it is decoded.
#[derive(Clone, Copy, Debug)]
pub struct PackedBlock<'a> {
    header: BlockHeader,
    layers: [Option<Layer>; LAYERS_MAX],
    /// The sections after the headers: signs and mantissas, bit planes of the layers, tail. A raw block has its
    /// elements in the first.
    sign_mantissa: &'a [u8],
    planes: &'a [u8],
    tail: &'a [u8],
}

/// Scratch memory for decoding: about two bytes for each element of a block at most. Reuse it for the next block.
#[derive(Debug, Default)]
pub struct Scratch {
    from: Vec<u8>,
    to: Vec<u8>,
}

impl<'a> PackedBlock<'a> {
    /// Parses the block at the start of `bytes` and ignores the rest. The next block starts after
    /// [`BlockHeader::encoded_bytes`].
    ///
    /// # Errors
    ///
    /// [`Error::Corrupt`] if the bytes are too few or inconsistent.
    pub fn parse(bytes: &'a [u8]) -> Result<Self> {
        let header = BlockHeader::parse(bytes)?;
        let Some(bytes) = bytes.get(..header.encoded_bytes) else {
            let len = bytes.len();
            return Err(Error::corrupt(
                12,
                format!("the block has {len} bytes, its header states {}", header.encoded_bytes),
            ));
        };
        let mut layers = [None; LAYERS_MAX];
        let (mut offset, mut left, mut planes_bytes) = (HEADER_BYTES, header.elements, 0);
        for place in layers.iter_mut().take(header.layers) {
            let Some(bytes) = bytes[offset..].first_chunk::<LAYER_BYTES>() else {
                return Err(Error::corrupt(offset, "the block ends within its layer headers"));
            };
            let layer = place.insert(Layer::parse(bytes, left, offset)?);
            (left, planes_bytes) = (layer.escaped, planes_bytes + layer.planes_bytes());
            offset += LAYER_BYTES;
        }
        if header.layers == 0 {
            return Ok(Self { header, layers, sign_mantissa: &bytes[offset..], planes: &[], tail: &[] });
        }
        let sign_mantissa_len = sign_mantissa_bytes(header.float, header.elements);
        let expected = offset + sign_mantissa_len + planes_bytes + left;
        if expected != bytes.len() {
            let what = format!("the layers take {expected} bytes, the header states {}", bytes.len());
            return Err(Error::corrupt(HEADER_BYTES, what));
        }
        let (sign_mantissa, rest) = bytes[offset..].split_at(sign_mantissa_len);
        let (planes, tail) = rest.split_at(planes_bytes);
        Ok(Self { header, layers, sign_mantissa, planes, tail })
    }

    /// Returns the header.
    #[must_use]
    pub fn header(&self) -> &BlockHeader {
        &self.header
    }

    /// Whether the elements are stored uncompressed.
    #[must_use]
    pub fn is_raw(&self) -> bool {
        self.header.layers == 0
    }

    /// Decodes all elements. For many blocks use [`PackedBlock::decode_with`].
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the length of `out` is not [`BlockHeader::decoded_bytes`]. [`Error::Corrupt`] if codes and
    /// layers are inconsistent; `out` is unspecified then.
    pub fn decode_into(&self, out: &mut [u8]) -> Result<()> {
        self.decode_with(&mut Scratch::default(), out)
    }

    /// Decodes all elements with scratch memory that is reused from block to block.
    ///
    /// # Errors
    ///
    /// As [`PackedBlock::decode_into`].
    pub fn decode_with(&self, scratch: &mut Scratch, out: &mut [u8]) -> Result<()> {
        if out.len() != self.header.decoded_bytes() {
            let (len, bytes) = (out.len(), self.header.decoded_bytes());
            return Err(Error::invalid(format!("room for {len} bytes, where the block has {bytes}")));
        }
        if self.is_raw() {
            out.copy_from_slice(self.sign_mantissa);
            return Ok(());
        }
        let decoded = dispatch(Decode { block: self, scratch, out });
        decoded.ok_or_else(|| Error::corrupt(HEADER_BYTES, "the codes of a layer do not match the size of the next"))
    }
}

struct Decode<'a> {
    block: &'a PackedBlock<'a>,
    scratch: &'a mut Scratch,
    out: &'a mut [u8],
}

impl SimdTask for Decode<'_> {
    type Output = Option<()>;

    #[inline(always)]
    fn run<C: GroupCodec>(self, codec: C) -> Option<()> {
        let Self { block, scratch: Scratch { from, to }, out } = self;
        let BlockHeader { float, elements, .. } = block.header;
        let mut planes = block.planes;
        let (first, deeper) = block.layers.split_first()?;
        ensure_len(from, block.tail.len() + WINDOW)[..block.tail.len()].copy_from_slice(block.tail);
        for layer in deeper.iter().rev().flatten() {
            let (others, own) = planes.split_at_checked(planes.len().checked_sub(layer.planes_bytes())?)?;
            planes = others;
            let symbols = ensure_len(to, layer.elements.next_multiple_of(GROUP) + WINDOW);
            let mut next = EscapeReader { bytes: from.get(..layer.escaped + WINDOW)?, taken: 0 };
            expand(codec, layer, own, &mut next, symbols)?;
            next.finish()?;
            std::mem::swap(from, to);
        }
        let first = (*first)?;
        let mut next = EscapeReader { bytes: from.get(..first.escaped + WINDOW)?, taken: 0 };
        let mut exponents = [0; STEP];
        let steps = out.chunks_mut(STEP * float.bytes()).zip(planes.chunks(STEP / GROUP * PLANES_BYTES));
        for (index, (out, planes)) in steps.enumerate() {
            let step = Layer { elements: out.len() / float.bytes(), ..first };
            expand(codec, &step, planes, &mut next, &mut exponents)?;
            assemble(codec, float, (&exponents[..step.elements], block.sign_mantissa), (index * STEP, elements), out);
        }
        next.finish()
    }
}

/// Reads the escaped symbols of a layer: those of the next layer, or the tail. [`WINDOW`] bytes of any values follow
/// them.
struct EscapeReader<'a> {
    bytes: &'a [u8],
    taken: usize,
}

impl EscapeReader<'_> {
    /// Checks that all symbols were used.
    fn finish(self) -> Option<()> {
        (self.taken + WINDOW == self.bytes.len()).then_some(())
    }
}

/// Expands the symbols of a layer, or of one step of it. Returns `None` if escapes run out before a group, or the
/// padding of the last group is not zero. [`EscapeReader::finish`] finds a last group that takes too many.
#[inline(always)]
fn expand(
    codec: impl GroupCodec,
    layer: &Layer,
    planes: &[u8],
    next: &mut EscapeReader<'_>,
    out: &mut [u8],
) -> Option<()> {
    let mut last = 0;
    for (planes, out) in planes.as_chunks::<PLANES_BYTES>().0.iter().zip(out.as_chunks_mut::<GROUP>().0) {
        let (low, high) = (word(planes, 0), word(planes, 8));
        let window = next.bytes.get(next.taken..)?.first_chunk()?;
        codec.expand(low, high, layer.symbols, window, out);
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

/// Grows the vector to at least `len` bytes. Returns the first `len`, which have any values.
fn ensure_len(bytes: &mut Vec<u8>, len: usize) -> &mut [u8] {
    if bytes.len() < len {
        bytes.resize(len, 0);
    }
    &mut bytes[..len]
}
