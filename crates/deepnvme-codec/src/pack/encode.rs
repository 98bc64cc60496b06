//! Packing one block: how often each exponent occurs, how many layers that is worth, and the layers.

use super::elements::{exponents, other_bytes, others};
use super::header::{Header, Layer};
use super::lanes::{Lanes, Task, widely};
use super::{BLOCK_ELEMENTS_MAX, GROUP, HEADER_BYTES, LAYER_BYTES, LAYERS_MAX, encoded_bytes_max};
use crate::{Error, Float, Result};

/// Packs elements as one block, behind what `out` has already: at most [`encoded_bytes_max`] bytes more.
///
/// The same elements give the same bytes on every machine.
///
/// # Errors
///
/// [`Error::Invalid`] for a part of an element, or more than [`BLOCK_ELEMENTS_MAX`].
pub fn encode(float: Float, bytes: &[u8], out: &mut Vec<u8>) -> Result<()> {
    let elements = bytes.len() / float.bytes();
    if !bytes.len().is_multiple_of(float.bytes()) || elements > BLOCK_ELEMENTS_MAX {
        let len = bytes.len();
        return Err(Error::invalid(format!(
            "{len} bytes of {float:?} are no block: it has whole elements, at most {BLOCK_ELEMENTS_MAX} of them"
        )));
    }
    out.reserve(encoded_bytes_max(bytes.len()));
    widely(Encode { float, bytes, elements, out });
    Ok(())
}

struct Encode<'a> {
    float: Float,
    bytes: &'a [u8],
    elements: usize,
    out: &'a mut Vec<u8>,
}

impl Task for Encode<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { float, bytes, elements, out } = self;
        let mut symbols = vec![0; elements.next_multiple_of(GROUP)];
        exponents(float, bytes, &mut symbols);
        let layers = choose(&counts(&symbols[..elements]), elements);
        let encoded_bytes = HEADER_BYTES + other_bytes(float, elements) + layers_bytes(&layers);
        if layers.is_empty() || encoded_bytes >= HEADER_BYTES + bytes.len() {
            Header { float, layers: 0, elements, encoded_bytes: HEADER_BYTES + bytes.len() }.write(out);
            out.extend_from_slice(bytes);
            return;
        }
        Header { float, layers: layers.len(), elements, encoded_bytes }.write(out);
        for layer in &layers {
            layer.write(out);
        }
        let begin = out.len();
        out.resize(begin + other_bytes(float, elements), 0);
        others(lanes, float, bytes, &mut out[begin..]);
        for layer in &layers {
            symbols = add_layer(lanes, layer, symbols, out);
        }
        out.extend_from_slice(&symbols[..layers.last().map_or(0, |layer| layer.rest)]);
    }
}

/// Writes the planes of a layer, and returns what goes on to the next.
#[inline(always)]
fn add_layer(lanes: impl Lanes, layer: &Layer, mut symbols: Vec<u8>, out: &mut Vec<u8>) -> Vec<u8> {
    symbols.truncate(layer.elements);
    // What fills up the last group has code 0, so that there is one encoding only.
    symbols.resize(layer.elements.next_multiple_of(GROUP), layer.symbols[0]);
    let mut rest = vec![0; layer.rest + GROUP];
    let mut taken = 0;
    for group in symbols.as_chunks::<GROUP>().0 {
        let mut asking = [0; GROUP];
        let (low, high) = lanes.gather(group, layer.symbols, &mut asking);
        rest[taken..taken + GROUP].copy_from_slice(&asking);
        out.extend(low.to_le_bytes());
        out.extend(high.to_le_bytes());
        taken += (low & high).count_ones() as usize;
    }
    rest
}

/// How often each symbol occurs. Four tables, since weights repeat themselves, and a count that was just written is slow
/// to read.
#[inline(always)]
fn counts(symbols: &[u8]) -> [u32; 256] {
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

/// The layers that make the fewest bytes, fewer layers where that is equal.
fn choose(counts: &[u32; 256], elements: usize) -> Vec<Layer> {
    let mut order: Vec<u8> = (0..=255).collect();
    order.sort_by_key(|symbol| std::cmp::Reverse(counts[usize::from(*symbol)]));
    let mut layers = Vec::with_capacity(LAYERS_MAX);
    let (mut left, mut best, mut best_bytes) = (elements, 0, usize::MAX);
    for symbols in order.as_chunks::<3>().0.iter().take(LAYERS_MAX) {
        let known: u32 = symbols.iter().map(|symbol| counts[usize::from(*symbol)]).sum();
        layers.push(Layer { symbols: *symbols, elements: left, rest: left - known as usize });
        left -= known as usize;
        let bytes = layers_bytes(&layers);
        if bytes < best_bytes {
            (best, best_bytes) = (layers.len(), bytes);
        }
    }
    layers.truncate(best);
    layers
}

/// Bytes of layers, their description and the tail.
fn layers_bytes(layers: &[Layer]) -> usize {
    let planes: usize = layers.iter().map(Layer::planes_bytes).sum();
    layers.len() * LAYER_BYTES + planes + layers.last().map_or(0, |layer| layer.rest)
}
