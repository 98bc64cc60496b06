//! Checksums that can be computed in any cut, by any number of threads, and the side-car that keeps them.
//!
//! A record has one CRC-32, as ZIP wants it, and one CRC-64/NVME for each cell of [`CELL_BYTES`], which says *where* it
//! is damaged and lets a reader check a sample. Both are linear, so that the sums of two neighbouring parts give the
//! sum of the whole: a writer hashes each part where it has it in the cache.

use std::collections::HashMap;

use crc_fast::{CrcAlgorithm, Digest};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::json;

/// Bytes of a cell: what one entry of the side-car covers.
pub const CELL_BYTES: u64 = 1 << 20;
/// The name of the side-car, below the archive's root, or in safetensors metadata.
pub const SIDE_CAR: &str = "deepnvme/checksums.json";
/// Its name in the metadata of a safetensors file.
pub const METADATA_KEY: &str = "deepnvme.checksums";

/// The sums of one part of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartSums {
    /// Bytes of the part.
    pub bytes: u64,
    /// CRC-32/ISO-HDLC.
    pub crc32: u32,
    /// CRC-64/NVME.
    pub crc64: u64,
}

/// Hashes a part.
pub struct Hasher {
    crc32: Digest,
    crc64: Digest,
    bytes: u64,
}

impl Default for Hasher {
    fn default() -> Self {
        Self { crc32: Digest::new(CrcAlgorithm::Crc32IsoHdlc), crc64: Digest::new(CrcAlgorithm::Crc64Nvme), bytes: 0 }
    }
}

impl Hasher {
    /// The next bytes of the part. Those in the processor's cache are hashed five times faster than the disk reads.
    pub fn update(&mut self, bytes: &[u8]) {
        self.crc32.update(bytes);
        self.crc64.update(bytes);
        self.bytes += bytes.len() as u64;
    }

    /// The sums.
    #[must_use]
    pub fn finish(&self) -> PartSums {
        PartSums { bytes: self.bytes, crc32: self.crc32.finalize() as u32, crc64: self.crc64.finalize() }
    }
}

/// The sums of a whole slice.
#[must_use]
pub fn sums_of(bytes: &[u8]) -> PartSums {
    let mut hasher = Hasher::default();
    hasher.update(bytes);
    hasher.finish()
}

impl PartSums {
    /// The sums of nothing.
    pub const EMPTY: Self = Self { bytes: 0, crc32: 0, crc64: 0 };

    /// The sums of this part with `next` behind it.
    #[must_use]
    pub fn then(self, next: Self) -> Self {
        self.joined(next, &Shift::by(next.bytes))
    }

    fn joined(self, next: Self, shift: &Shift) -> Self {
        if self.bytes == 0 {
            return next;
        }
        let crc32 = Polynomial::CRC32.multiply(shift.crc32, u64::from(self.crc32)) as u32;
        Self {
            bytes: self.bytes + next.bytes,
            crc32: crc32 ^ next.crc32,
            crc64: Polynomial::CRC64.multiply(shift.crc64, self.crc64) ^ next.crc64,
        }
    }
}

/// What sums are multiplied by so that they are those of as many zero bytes more.
struct Shift {
    crc32: u64,
    crc64: u64,
}

impl Shift {
    fn by(bytes: u64) -> Self {
        Self { crc32: Polynomial::CRC32.power(bytes), crc64: Polynomial::CRC64.power(bytes) }
    }
}

/// The sums of a record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordSums {
    /// Of all bytes.
    pub crc32: u32,
    /// Of each cell; the last may be short.
    pub cells: Vec<u64>,
}

impl RecordSums {
    /// From the sums of its parts, each with its offset, in any order. No part may cross the border of a cell.
    ///
    /// # Errors
    /// `Invalid` where the parts leave a gap, overlap, or cross a border.
    pub fn from_parts(mut parts: Vec<(u64, PartSums)>) -> Result<Self> {
        parts.sort_unstable_by_key(|(offset, _)| *offset);
        let (mut whole, mut cell) = (PartSums::EMPTY, PartSums::EMPTY);
        let mut cells = Vec::new();
        // Parts have few sizes, whose factors are computed once.
        let mut shifts: HashMap<u64, Shift> = HashMap::new();
        for (offset, part) in parts {
            if offset != whole.bytes || cell.bytes + part.bytes > CELL_BYTES {
                return Err(Error::invalid(format!("the sums of a record do not join at byte {offset}")));
            }
            let shift = shifts.entry(part.bytes).or_insert_with(|| Shift::by(part.bytes));
            whole = whole.joined(part, shift);
            cell = cell.joined(part, shift);
            if cell.bytes == CELL_BYTES {
                cells.push(std::mem::replace(&mut cell, PartSums::EMPTY).crc64);
            }
        }
        if cell.bytes > 0 {
            cells.push(cell.crc64);
        }
        Ok(Self { crc32: whole.crc32, cells })
    }
}

/// How many cells so many bytes have.
#[must_use]
pub fn cell_count(bytes: u64) -> usize {
    bytes.div_ceil(CELL_BYTES) as usize
}

/// Bytes of the side-car's text for the cells of so many bytes: what [`encode`] adds to its text without any cells. A
/// tensor may claim more bytes than there is memory for the sums of.
#[must_use]
pub fn text_bytes(bytes: u64) -> u64 {
    bytes.div_ceil(CELL_BYTES) * HEX_DIGITS as u64
}

/// What the side-car says of one record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SideCarRecord {
    /// The record's name.
    pub name: String,
    /// The CRC-64/NVME of each cell.
    pub cells: Vec<u64>,
}

#[derive(Serialize, Deserialize)]
struct Wire<R> {
    version: u32,
    algorithm: String,
    cell_bytes: u64,
    records: R,
}

const ALGORITHM: &str = "crc-64/nvme";
const HEX_DIGITS: usize = 16;

/// The side-car's text for the names of records and their cells. Its length depends on the names and the numbers of cells
/// only, so that a place can be kept for it.
#[must_use]
pub fn encode<'a>(records: impl Iterator<Item = (&'a str, &'a [u64])> + Clone) -> String {
    let digits = records.map(|(name, cells)| (name, cells.iter().flat_map(|cell| hex(*cell)).collect::<String>()));
    let records = json::Entries(digits);
    let wire = Wire { version: 1, algorithm: ALGORITHM.into(), cell_bytes: CELL_BYTES, records };
    serde_json::to_string(&wire).unwrap_or_default()
}

/// All sixteen digits.
fn hex(cell: u64) -> impl Iterator<Item = char> {
    (0..HEX_DIGITS as u32).rev().filter_map(move |place| char::from_digit((cell >> (4 * place) & 15) as u32, 16))
}

/// Reads a side-car.
///
/// # Errors
/// `Corrupt` for text that is not one; `Unsupported` for one of a later version.
pub fn decode(text: &[u8]) -> Result<Vec<SideCarRecord>> {
    let wire: Wire<json::Object<String>> = serde_json::from_slice(text)
        .map_err(|error| Error::corrupt(0, format!("the checksums are no JSON that deepnvme writes: {error}")))?;
    if wire.version != 1 || wire.algorithm != ALGORITHM || wire.cell_bytes != CELL_BYTES {
        let what = format!("checksums of version {}, {} over {} bytes", wire.version, wire.algorithm, wire.cell_bytes);
        return Err(Error::unsupported(format!(
            "{what}; a later deepnvme wrote them: upgrade, or load with verify='off'"
        )));
    }
    let records = wire.records.0.into_iter().map(|(name, digits)| {
        let is_hex = digits.len() % HEX_DIGITS == 0 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        if !is_hex {
            return Err(Error::corrupt(0, format!("the checksums of {name:?} are no hexadecimal numbers")));
        }
        let cells = (0..digits.len()).step_by(HEX_DIGITS);
        let cells = cells.map(|at| u64::from_str_radix(&digits[at..at + HEX_DIGITS], 16).unwrap_or_default());
        Ok(SideCarRecord { name, cells: cells.collect() })
    });
    records.collect()
}

/// A polynomial over GF(2) without its highest term, bits reflected, as wide as the sum that it belongs to.
#[derive(Clone, Copy)]
struct Polynomial {
    reflected: u64,
    bits: u32,
}

impl Polynomial {
    const CRC32: Self = Self { reflected: 0xEDB8_8320, bits: 32 };
    const CRC64: Self = Self { reflected: 0x9A6C_9329_AC4B_C9B5, bits: 64 };

    /// The product of two polynomials, modulo this one. The highest bit stands for 1.
    fn multiply(self, left: u64, mut right: u64) -> u64 {
        let mut product = 0;
        for bit in (0..self.bits).rev() {
            if left >> bit & 1 == 1 {
                product ^= right;
            }
            right = if right & 1 == 1 { right >> 1 ^ self.reflected } else { right >> 1 };
        }
        product
    }

    /// x to the power of eight for each byte, by squaring. Multiplied by it, a sum is what it would be with so many zero
    /// bytes behind it (the inversions of the standards cancel out).
    fn power(self, bytes: u64) -> u64 {
        let one = 1 << (self.bits - 1);
        let (mut factor, mut power) = (one >> 8, one);
        let mut left = bytes;
        while left > 0 {
            if left & 1 == 1 {
                power = self.multiply(factor, power);
            }
            factor = self.multiply(factor, factor);
            left >>= 1;
        }
        power
    }
}

#[cfg(test)]
mod tests;
