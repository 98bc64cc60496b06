//! Checksums that can be computed in any cut, by any number of threads, and the side-car that keeps them.
//!
//! A record has one CRC-32, as ZIP wants it, and one CRC-64/NVME for each cell of [`CELL_BYTES`], which says *where* it
//! is damaged and lets a reader check a sample. Both are linear, so that the sums of two neighbouring parts give the
//! sum of the whole: a writer hashes each part where it has it in the cache.

use std::collections::HashMap;
use std::ops::Range;

use crc_fast::{CrcAlgorithm, Digest};
use serde::{Deserialize, Serialize};

use crate::JSON_ROOM;
use crate::error::{Error, Result};
use crate::json;

/// Bytes of a cell: what one entry of the side-car covers.
pub const CELL_BYTES: u64 = if cfg!(simulated) { 8 << 10 } else { 1 << 20 };
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
    crc32: Option<Digest>,
    crc64: Option<Digest>,
    bytes: u64,
}

impl Default for Hasher {
    fn default() -> Self {
        Self { crc32: Self::of_records().crc32, ..Self::of_cells() }
    }
}

impl Hasher {
    /// For the sum that cells have; the other one is nothing.
    #[must_use]
    pub fn of_cells() -> Self {
        Self { crc32: None, crc64: Some(Digest::new(CrcAlgorithm::Crc64Nvme)), bytes: 0 }
    }

    /// For the sum that records of archives have; the other one is nothing.
    #[must_use]
    pub fn of_records() -> Self {
        Self { crc32: Some(Digest::new(CrcAlgorithm::Crc32IsoHdlc)), crc64: None, bytes: 0 }
    }

    /// The next bytes of the part. Those in the processor's cache are hashed five times faster than the disk reads.
    pub fn update(&mut self, bytes: &[u8]) {
        for digest in [&mut self.crc32, &mut self.crc64].into_iter().flatten() {
            digest.update(bytes);
        }
        self.bytes += bytes.len() as u64;
    }

    /// The sums.
    #[must_use]
    pub fn finish(&self) -> PartSums {
        let sum = |digest: &Option<Digest>| digest.as_ref().map_or(0, Digest::finalize);
        PartSums { bytes: self.bytes, crc32: sum(&self.crc32) as u32, crc64: sum(&self.crc64) }
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

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WireV1 {
    #[serde(rename = "version")]
    _version: u32,
    algorithm: String,
    cell_bytes: u64,
    records: json::Object<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wire<R> {
    version: u32,
    index: String,
    #[serde(rename = "self")]
    own: String,
    /// Sixteen digits each, as all sums: the text has its length before the file does.
    file_bytes: String,
    index_offset: String,
    index_bytes: String,
    algorithm: String,
    cell_bytes: u64,
    records: R,
}

#[derive(Deserialize)]
struct Version {
    version: u32,
}

const ALGORITHM: &str = "crc-64/nvme";
const VERSION: u32 = 2;
pub(crate) const HEX_DIGITS: usize = 16;
const BLANK: &str = "0000000000000000";
/// What a side-car begins with; the sum of the index stands behind it.
const HEAD: &str = r#"{"version":2,"index":""#;
/// What stands between the sum of the index and that of the side-car.
const BETWEEN: &str = r#"","self":""#;
/// [`HEAD`] as the header of a safetensors file has it.
const QUOTED_HEAD: &str = r#""deepnvme.checksums":"{\"version\":2,\"index\":\""#;

/// The file that checksums were made for. Another file of the same bytes in another place has another frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Frame {
    /// Bytes of the file.
    pub file_bytes: u64,
    /// Where its index begins: the header of a safetensors file, or the side-car of an archive and all that follows it.
    pub index_offset: u64,
    /// Bytes of the index.
    pub index_bytes: u64,
}

/// A frame, and the sum of the index in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seal {
    /// The file that it was made for.
    pub frame: Frame,
    /// The CRC-64/NVME of the index, without the digits of this sum itself.
    pub index_crc64: u64,
}

/// What a side-car says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SideCar {
    /// The records, in the order of the file.
    pub records: Vec<SideCarRecord>,
    /// What covers the rest of the file. Files of version 1 have none: nothing vouches for names, types and shapes.
    pub seal: Option<Seal>,
}

/// Where in the text of a side-car the sum of the index stands.
pub const INDEX_DIGITS: Range<usize> = HEAD.len()..HEAD.len() + HEX_DIGITS;
const OWN_DIGITS: Range<usize> = INDEX_DIGITS.end + BETWEEN.len()..INDEX_DIGITS.end + BETWEEN.len() + HEX_DIGITS;

/// The side-car's text for the names of records and their cells, in a file of that frame. The sum of the index is blank:
/// [`seal`] puts it in. Its length depends on the names and the numbers of cells only, so that a place can be
/// kept for it.
#[must_use]
pub fn encode<'a>(records: impl Iterator<Item = (&'a str, &'a [u64])> + Clone, frame: Frame) -> String {
    let digits = records.map(|(name, cells)| (name, cells.iter().flat_map(|cell| hex(*cell)).collect::<String>()));
    let records = json::Entries(digits);
    let number = |number| hex(number).collect::<String>();
    let wire = Wire {
        version: VERSION,
        index: BLANK.into(),
        own: BLANK.into(),
        file_bytes: number(frame.file_bytes),
        index_offset: number(frame.index_offset),
        index_bytes: number(frame.index_bytes),
        algorithm: ALGORITHM.into(),
        cell_bytes: CELL_BYTES,
        records,
    };
    let mut text = serde_json::to_string(&wire).unwrap_or_default();
    let own: String = hex(own_sum(text.as_bytes())).collect();
    text.replace_range(OWN_DIGITS, &own);
    text
}

/// All sixteen digits.
pub(crate) fn hex(cell: u64) -> impl Iterator<Item = char> {
    (0..HEX_DIGITS as u32).rev().filter_map(move |place| char::from_digit((cell >> (4 * place) & 15) as u32, 16))
}

/// The sum that stands there. Each sum has one spelling, so that no digit can change unnoticed.
pub(crate) fn sum_at(text: &[u8], place: Range<usize>) -> Option<u64> {
    let digits = std::str::from_utf8(text.get(place)?).ok()?;
    let sum = u64::from_str_radix(digits, 16).ok()?;
    hex(sum).eq(digits.chars()).then_some(sum)
}

/// The sum of a side-car's text, without the two sums at its beginning.
fn own_sum(text: &[u8]) -> u64 {
    covered_sum(text, &[INDEX_DIGITS, OWN_DIGITS])
}

/// The CRC-64/NVME of bytes, without those in `holes`, which are in order and do not overlap.
#[must_use]
pub fn covered_sum(bytes: &[u8], holes: &[Range<usize>]) -> u64 {
    let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
    let mut at = 0;
    for hole in holes {
        digest.update(bytes.get(at..hole.start).unwrap_or_default());
        at = hole.end;
    }
    digest.update(bytes.get(at..).unwrap_or_default());
    digest.finalize()
}

/// Writes the sum of an index into its `holes`: the first one has the digits.
pub fn seal(index: &mut [u8], digits: Range<usize>, holes: &[Range<usize>]) {
    let sum = covered_sum(index, holes);
    for (place, digit) in index[digits].iter_mut().zip(hex(sum)) {
        *place = digit as u8;
    }
}

/// Where in the header of a safetensors file the sum of the index stands, if deepnvme has written the header.
#[must_use]
pub fn quoted_digits(header: &[u8]) -> Option<Range<usize>> {
    let head = QUOTED_HEAD.as_bytes();
    // A name that looks like it has its quotes escaped.
    let start = header.windows(head.len()).position(|window| window == head)? + head.len();
    (start + HEX_DIGITS <= header.len()).then_some(start..start + HEX_DIGITS)
}

/// Reads a side-car.
///
/// # Errors
/// `Corrupt` for text that is not one, or was changed; `Unsupported` for one of a later version.
pub fn decode(text: &[u8]) -> Result<SideCar> {
    Error::unless_there_is_room("the checksums", text.len(), JSON_ROOM)?;
    let no_json = |error| Error::corrupt(0, format!("the checksums are no JSON that deepnvme writes: {error}"));
    let Version { version } = serde_json::from_slice(text).map_err(no_json)?;
    let (algorithm, cell_bytes, records, seal) = match version {
        1 => {
            let wire: WireV1 = serde_json::from_slice(text).map_err(no_json)?;
            (wire.algorithm, wire.cell_bytes, wire.records, None)
        }
        VERSION => {
            let wire: Wire<json::Object<String>> = serde_json::from_slice(text).map_err(no_json)?;
            let is_as_written = text.starts_with(HEAD.as_bytes())
                && text.get(INDEX_DIGITS.end..OWN_DIGITS.start) == Some(BETWEEN.as_bytes())
                && sum_at(text, OWN_DIGITS) == Some(own_sum(text));
            let numbers = [&wire.file_bytes, &wire.index_offset, &wire.index_bytes];
            let [file_bytes, index_offset, index_bytes] =
                numbers.map(|digits| sum_at(digits.as_bytes(), 0..HEX_DIGITS).filter(|_| is_as_written));
            let seal = (|| {
                let frame = Frame { file_bytes: file_bytes?, index_offset: index_offset?, index_bytes: index_bytes? };
                Some(Seal { frame, index_crc64: sum_at(text, INDEX_DIGITS)? })
            })();
            if seal.is_none() {
                return Err(Error::corrupt(0, "the checksums themselves are not those that were saved"));
            }
            (wire.algorithm, wire.cell_bytes, wire.records, seal)
        }
        _ => return Err(later(&format!("checksums of version {version}"))),
    };
    if algorithm != ALGORITHM || cell_bytes != CELL_BYTES {
        return Err(later(&format!("checksums of version {version}, {algorithm} over {cell_bytes} bytes")));
    }
    let records = records.0.into_iter().map(|(name, digits)| {
        let is_hex = digits.len() % HEX_DIGITS == 0 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        if !is_hex {
            return Err(Error::corrupt(0, format!("the checksums of {name:?} are no hexadecimal numbers")));
        }
        let cells = (0..digits.len()).step_by(HEX_DIGITS);
        let cells = cells.map(|at| u64::from_str_radix(&digits[at..at + HEX_DIGITS], 16).unwrap_or_default());
        Ok(SideCarRecord { name, cells: cells.collect() })
    });
    Ok(SideCar { records: records.collect::<Result<_>>()?, seal })
}

fn later(what: &str) -> Error {
    Error::unsupported(format!("{what}; a later deepnvme wrote them: upgrade, or load with verify='off'"))
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
