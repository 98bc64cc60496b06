//! Encoding of one block: histogram of exponents, choice of layers, and the layers.

use super::elements::{extract_exponents, extract_sign_mantissa, sign_mantissa_bytes};
use super::header::{BlockHeader, Layer};
use super::simd::{GroupCodec, SimdTask, dispatch};
use super::{BLOCK_ELEMENTS_MAX, GROUP, HEADER_BYTES, LAYER_BYTES, LAYERS_MAX, encoded_bytes_max};
use crate::{Error, Float, Result};

/// Encodes elements as one block and appends it to `out`: at most [`encoded_bytes_max`] bytes.
///
/// The encoding of elements is the same on every machine.
///
/// # Errors
///
/// [`Error::Invalid`] if `bytes` ends within an element, or has more than [`BLOCK_ELEMENTS_MAX`] elements.
pub fn encode(float: Float, bytes: &[u8], out: &mut Vec<u8>) -> Result<()> {
    let elements = bytes.len() / float.bytes();
    if !bytes.len().is_multiple_of(float.bytes()) || elements > BLOCK_ELEMENTS_MAX {
        let len = bytes.len();
        return Err(Error::invalid(format!(
            "{len} bytes of {float:?} do not fit a block: pass whole elements, at most {BLOCK_ELEMENTS_MAX}"
        )));
    }
    out.reserve(encoded_bytes_max(bytes.len()));
    dispatch(Encode { float, bytes, elements, out });
    Ok(())
}

struct Encode<'a> {
    float: Float,
    bytes: &'a [u8],
    elements: usize,
    out: &'a mut Vec<u8>,
}

impl SimdTask for Encode<'_> {
    type Output = ();

    #[inline(always)]
    fn run<C: GroupCodec>(self, codec: C) {
        let Self { float, bytes, elements, out } = self;
        let mut symbols = vec![0; elements.next_multiple_of(GROUP)];
        extract_exponents(float, bytes, &mut symbols);
        let layers = choose_layers(&histogram(&symbols[..elements]), elements);
        let encoded_bytes = HEADER_BYTES + sign_mantissa_bytes(float, elements) + layers_bytes(&layers);
        if layers.is_empty() || encoded_bytes >= HEADER_BYTES + bytes.len() {
            BlockHeader { float, layers: 0, elements, encoded_bytes: HEADER_BYTES + bytes.len() }.write(out);
            out.extend_from_slice(bytes);
            return;
        }
        BlockHeader { float, layers: layers.len(), elements, encoded_bytes }.write(out);
        for layer in &layers {
            layer.write(out);
        }
        let begin = out.len();
        out.resize(begin + sign_mantissa_bytes(float, elements), 0);
        extract_sign_mantissa(codec, float, bytes, &mut out[begin..]);
        for layer in &layers {
            symbols = write_layer(codec, layer, symbols, out);
        }
        out.extend_from_slice(&symbols[..layers.last().map_or(0, |layer| layer.escaped)]);
    }
}

/// Writes the bit planes of a layer. Returns the escaped symbols, and padding after them.
#[inline(always)]
fn write_layer(codec: impl GroupCodec, layer: &Layer, mut symbols: Vec<u8>, out: &mut Vec<u8>) -> Vec<u8> {
    symbols.truncate(layer.elements);
    // Padding of the last group has code 0, so that the encoding is unique.
    symbols.resize(layer.elements.next_multiple_of(GROUP), layer.symbols[0]);
    let mut escapes = vec![0; layer.escaped + GROUP];
    let mut taken = 0;
    for group in symbols.as_chunks::<GROUP>().0 {
        let mut escaped = [0; GROUP];
        let (low, high) = codec.compress(group, layer.symbols, &mut escaped);
        escapes[taken..taken + GROUP].copy_from_slice(&escaped);
        out.extend(low.to_le_bytes());
        out.extend(high.to_le_bytes());
        taken += (low & high).count_ones() as usize;
    }
    escapes
}

/// Counts each symbol. Four tables, since exponents often repeat, and reading a count that was just written is slow.
#[inline(always)]
fn histogram(symbols: &[u8]) -> [u32; 256] {
    let mut tables = [[0; 256]; 4];
    let (fours, rest) = symbols.as_chunks::<4>();
    for four in fours {
        for (table, symbol) in tables.iter_mut().zip(four) {
            table[usize::from(*symbol)] += 1;
        }
    }
    for symbol in rest {
        tables[0][usize::from(*symbol)] += 1;
    }
    let [mut sums, others @ ..] = tables;
    for table in others {
        for (sum, count) in sums.iter_mut().zip(table) {
            *sum += count;
        }
    }
    sums
}

/// Chooses the layers with the fewest bytes, and fewer layers in a tie.
fn choose_layers(counts: &[u32; 256], elements: usize) -> Vec<Layer> {
    let mut order: Vec<u8> = (0..=255).collect();
    order.sort_by_key(|symbol| std::cmp::Reverse(counts[usize::from(*symbol)]));
    let mut layers = Vec::with_capacity(LAYERS_MAX);
    let (mut left, mut best, mut best_bytes) = (elements, 0, usize::MAX);
    for symbols in order.as_chunks::<3>().0.iter().take(LAYERS_MAX) {
        let known: u32 = symbols.iter().map(|symbol| counts[usize::from(*symbol)]).sum();
        layers.push(Layer { symbols: *symbols, elements: left, escaped: left - known as usize });
        left -= known as usize;
        let bytes = layers_bytes(&layers);
        if bytes < best_bytes {
            (best, best_bytes) = (layers.len(), bytes);
        }
    }
    layers.truncate(best);
    layers
}

/// Returns the bytes of layers, their headers and the tail.
fn layers_bytes(layers: &[Layer]) -> usize {
    let planes: usize = layers.iter().map(Layer::planes_bytes).sum();
    layers.len() * LAYER_BYTES + planes + layers.last().map_or(0, |layer| layer.escaped)
}
