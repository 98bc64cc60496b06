//! The header of a block, and its validation.

use super::{BLOCK_ELEMENTS_MAX, GROUP, HEADER_BYTES, LAYER_BYTES, LAYERS_MAX, MAGIC, PLANES_BYTES};
use crate::{Error, Float, Result};

/// The first [`HEADER_BYTES`] of a block. They give its encoded and decoded sizes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockHeader {
    pub(super) float: Float,
    pub(super) layers: usize,
    pub(super) elements: usize,
    pub(super) encoded_bytes: usize,
}

impl BlockHeader {
    /// Parses a header. Ignores the bytes after it.
    ///
    /// # Errors
    ///
    /// [`Error::Corrupt`] if it is too short, or has another version, an unknown type, too many layers, reserved bytes
    /// that are not zero, or impossible sizes.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let Some(bytes) = bytes.first_chunk::<HEADER_BYTES>() else {
            return Err(Error::corrupt(0, format!("{} bytes are too few for a header of {HEADER_BYTES}", bytes.len())));
        };
        if bytes[..4] != MAGIC {
            return Err(Error::corrupt(0, format!("not a packed block of a known version: {:02x?}", &bytes[..4])));
        }
        let float = match bytes[4] {
            1 => Float::Bf16,
            2 => Float::F16,
            3 => Float::F32,
            other => return Err(Error::corrupt(4, format!("{other} is not a known element type"))),
        };
        let layers = usize::from(bytes[5]);
        if layers > LAYERS_MAX {
            return Err(Error::corrupt(5, format!("{layers} layers exceed the maximum of {LAYERS_MAX}")));
        }
        if bytes[6..8] != [0, 0] {
            return Err(Error::corrupt(6, "reserved bytes are not zero"));
        }
        let elements = word(bytes, 8);
        if elements > BLOCK_ELEMENTS_MAX {
            return Err(Error::corrupt(8, format!("{elements} elements exceed the maximum of {BLOCK_ELEMENTS_MAX}")));
        }
        let header = Self { float, layers, elements, encoded_bytes: word(bytes, 12) };
        header.check_size()?;
        Ok(header)
    }

    /// Returns the type of the elements.
    #[must_use]
    pub fn float(&self) -> Float {
        self.float
    }

    /// Returns the number of elements, at most [`BLOCK_ELEMENTS_MAX`].
    #[must_use]
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// Returns the bytes of the block, header included.
    #[must_use]
    pub fn encoded_bytes(&self) -> usize {
        self.encoded_bytes
    }

    /// Returns the bytes of the decoded elements.
    #[must_use]
    pub fn decoded_bytes(&self) -> usize {
        self.elements * self.float.bytes()
    }

    pub(super) fn write(&self, out: &mut Vec<u8>) {
        let float = match self.float {
            Float::Bf16 => 1,
            Float::F16 => 2,
            Float::F32 => 3,
        };
        out.extend(MAGIC);
        out.extend([float, self.layers as u8, 0, 0]);
        out.extend((self.elements as u32).to_le_bytes());
        out.extend((self.encoded_bytes as u32).to_le_bytes());
    }

    /// Checks the encoded size: a header and the raw elements for a raw block, and less for a block with layers.
    fn check_size(&self) -> Result<()> {
        let (bytes, raw) = (self.encoded_bytes, HEADER_BYTES + self.decoded_bytes());
        let possible = match self.layers {
            0 => bytes == raw,
            layers => (HEADER_BYTES + layers * LAYER_BYTES..raw).contains(&bytes),
        };
        if possible {
            return Ok(());
        }
        let Self { layers, elements, .. } = self;
        Err(Error::corrupt(12, format!("{elements} elements in {layers} layers cannot take {bytes} bytes")))
    }
}

/// One layer: its three symbols, its elements, and how many of them escape to the next layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Layer {
    pub(super) symbols: [u8; 3],
    pub(super) elements: usize,
    pub(super) escaped: usize,
}

impl Layer {
    /// Parses the layer header at `offset` of a block, for a layer of `elements` elements.
    pub(super) fn parse(bytes: &[u8; LAYER_BYTES], elements: usize, offset: usize) -> Result<Self> {
        let escaped = word(bytes, 4);
        if escaped > elements {
            return Err(Error::corrupt(
                offset + 4,
                format!("{escaped} of {elements} elements escape to the next layer"),
            ));
        }
        if bytes[3] != 0 {
            return Err(Error::corrupt(offset + 3, "a reserved byte is not zero"));
        }
        Ok(Self { symbols: [bytes[0], bytes[1], bytes[2]], elements, escaped })
    }

    pub(super) fn write(&self, out: &mut Vec<u8>) {
        let [first, second, third] = self.symbols;
        out.extend([first, second, third, 0]);
        out.extend((self.escaped as u32).to_le_bytes());
    }

    /// Returns the bytes of its bit planes.
    pub(super) fn planes_bytes(&self) -> usize {
        self.elements.div_ceil(GROUP) * PLANES_BYTES
    }
}

/// Reads a little-endian u32, which the caller knows to be in bounds.
fn word(bytes: &[u8], offset: usize) -> usize {
    u32::from_le_bytes([bytes[offset], bytes[offset + 1], bytes[offset + 2], bytes[offset + 3]]) as usize
}
