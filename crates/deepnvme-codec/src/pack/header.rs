//! What a block says about itself before its first code, and whether that can be true.

use super::{BLOCK_ELEMENTS_MAX, GROUP, HEADER_BYTES, LAYER_BYTES, LAYERS_MAX, MAGIC, PLANES_BYTES};
use crate::{Error, Float, Result};

/// The first [`HEADER_BYTES`] of a block: enough to know how many more to wait for, and how many they become.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    pub(super) float: Float,
    pub(super) layers: usize,
    pub(super) elements: usize,
    pub(super) encoded_bytes: usize,
}

impl Header {
    /// Reads a header; bytes behind it are not looked at.
    ///
    /// # Errors
    ///
    /// [`Error::Corrupt`] where it is too short, of another version, or promises what no block can be.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let Some(bytes) = bytes.first_chunk::<HEADER_BYTES>() else {
            return Err(Error::corrupt(0, format!("{} bytes are no header of {HEADER_BYTES}", bytes.len())));
        };
        if bytes[..4] != MAGIC {
            return Err(Error::corrupt(0, format!("no packed block of a known version: {:02x?}", &bytes[..4])));
        }
        let float = match bytes[4] {
            1 => Float::Bf16,
            2 => Float::F16,
            3 => Float::F32,
            other => return Err(Error::corrupt(4, format!("{other} is no known type of elements"))),
        };
        let layers = usize::from(bytes[5]);
        if layers > LAYERS_MAX {
            return Err(Error::corrupt(5, format!("{layers} layers, of at most {LAYERS_MAX}")));
        }
        if bytes[6..8] != [0, 0] {
            return Err(Error::corrupt(6, "reserved bytes that are not zero"));
        }
        let elements = word(bytes, 8);
        if elements > BLOCK_ELEMENTS_MAX {
            return Err(Error::corrupt(8, format!("{elements} elements, of at most {BLOCK_ELEMENTS_MAX}")));
        }
        let header = Self { float, layers, elements, encoded_bytes: word(bytes, 12) };
        header.check_size()?;
        Ok(header)
    }

    /// The type of the elements.
    #[must_use]
    pub fn float(&self) -> Float {
        self.float
    }

    /// How many elements there are, at most [`BLOCK_ELEMENTS_MAX`].
    #[must_use]
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// Bytes of the block, header included.
    #[must_use]
    pub fn encoded_bytes(&self) -> usize {
        self.encoded_bytes
    }

    /// Bytes of the elements when they are decoded.
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

    /// A block is never longer than its elements and a header, and a raw one exactly that long.
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

/// One layer: its three symbols, how many elements it has, and how many of them ask the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Layer {
    pub(super) symbols: [u8; 3],
    pub(super) elements: usize,
    pub(super) rest: usize,
}

impl Layer {
    /// Reads what stands at `offset` of a block, for a layer of so many elements.
    pub(super) fn parse(bytes: &[u8; LAYER_BYTES], elements: usize, offset: usize) -> Result<Self> {
        let rest = word(bytes, 4);
        if rest > elements {
            return Err(Error::corrupt(offset + 4, format!("{rest} of {elements} elements go on to the next layer")));
        }
        if bytes[3] != 0 {
            return Err(Error::corrupt(offset + 3, "a reserved byte that is not zero"));
        }
        Ok(Self { symbols: [bytes[0], bytes[1], bytes[2]], elements, rest })
    }

    pub(super) fn write(&self, out: &mut Vec<u8>) {
        let [first, second, third] = self.symbols;
        out.extend([first, second, third, 0]);
        out.extend((self.rest as u32).to_le_bytes());
    }

    /// Bytes of its planes.
    pub(super) fn planes_bytes(&self) -> usize {
        self.elements.div_ceil(GROUP) * PLANES_BYTES
    }
}

/// A little-endian number of four bytes, which the caller knows to be there.
fn word(bytes: &[u8], offset: usize) -> usize {
    u32::from_le_bytes([bytes[offset], bytes[offset + 1], bytes[offset + 2], bytes[offset + 3]]) as usize
}
