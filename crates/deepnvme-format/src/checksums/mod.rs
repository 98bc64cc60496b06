//! Checksums that combine over any split and any number of threads, and the sidecar that stores them.
//!
//! A record has one CRC-32, which ZIP requires, and one CRC-64/NVME for each chunk of [`CHUNK_BYTES`], which locates
//! damage and lets a reader check a sample. Both are linear, so the checksums of adjacent parts combine to that of
//! the whole: a writer hashes each part while it is cached.

use std::collections::HashMap;
use std::ops::Range;

use crc_fast::{CrcAlgorithm, Digest};
use serde::{Deserialize, Serialize};

use crate::JSON_MEMORY_FACTOR;
use crate::error::{Error, Result};
use crate::json;

/// Bytes of a chunk, which one checksum of the sidecar covers.
pub const CHUNK_BYTES: u64 = if cfg!(simulated) { 8 << 10 } else { 1 << 20 };
/// Name of the sidecar's record in an archive.
pub const SIDECAR: &str = "deepnvme/checksums.json";
/// Key of the sidecar in the metadata of a safetensors file.
pub const METADATA_KEY: &str = "deepnvme.checksums";

/// The checksums of one part of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartChecksums {
    /// Length of the part in bytes.
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
        Self { crc32: Self::of_records().crc32, ..Self::of_chunks() }
    }
}

impl Hasher {
    /// Creates a hasher for the checksum of chunks only.
    #[must_use]
    pub fn of_chunks() -> Self {
        Self { crc32: None, crc64: Some(Digest::new(CrcAlgorithm::Crc64Nvme)), bytes: 0 }
    }

    /// Creates a hasher for the checksum of archive records only.
    #[must_use]
    pub fn of_records() -> Self {
        Self { crc32: Some(Digest::new(CrcAlgorithm::Crc32IsoHdlc)), crc64: None, bytes: 0 }
    }

    /// Hashes the next bytes of the part. Cached bytes are hashed five times faster than the disk reads.
    pub fn update(&mut self, bytes: &[u8]) {
        for digest in [&mut self.crc32, &mut self.crc64].into_iter().flatten() {
            digest.update(bytes);
        }
        self.bytes += bytes.len() as u64;
    }

    /// Returns the checksums. One that this hasher does not compute is 0.
    #[must_use]
    pub fn finish(&self) -> PartChecksums {
        let sum = |digest: &Option<Digest>| digest.as_ref().map_or(0, Digest::finalize);
        PartChecksums { bytes: self.bytes, crc32: sum(&self.crc32) as u32, crc64: sum(&self.crc64) }
    }
}

/// Returns the checksums of a slice.
#[must_use]
pub fn checksums_of(bytes: &[u8]) -> PartChecksums {
    let mut hasher = Hasher::default();
    hasher.update(bytes);
    hasher.finish()
}

impl PartChecksums {
    /// The checksums of no bytes.
    pub const EMPTY: Self = Self { bytes: 0, crc32: 0, crc64: 0 };

    /// Returns the checksums of this part followed by `next`.
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

/// Factors that extend checksums by a number of zero bytes.
struct Shift {
    crc32: u64,
    crc64: u64,
}

impl Shift {
    fn by(bytes: u64) -> Self {
        Self { crc32: Polynomial::CRC32.power(bytes), crc64: Polynomial::CRC64.power(bytes) }
    }
}

/// The checksums of a record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordChecksums {
    /// CRC-32 of all bytes.
    pub crc32: u32,
    /// CRC-64/NVME of each chunk. The last chunk may be short.
    pub chunks: Vec<u64>,
}

impl RecordChecksums {
    /// Combines the checksums of parts with their offsets, in any order. No part may cross a chunk boundary.
    ///
    /// # Errors
    /// `Invalid` if the parts leave a gap, overlap, or cross a boundary.
    pub fn from_parts(mut parts: Vec<(u64, PartChecksums)>) -> Result<Self> {
        parts.sort_unstable_by_key(|(offset, _)| *offset);
        let (mut whole, mut chunk) = (PartChecksums::EMPTY, PartChecksums::EMPTY);
        let mut chunks = Vec::new();
        // Parts have few sizes, whose factors are computed once.
        let mut shifts: HashMap<u64, Shift> = HashMap::new();
        for (offset, part) in parts {
            if offset != whole.bytes || chunk.bytes + part.bytes > CHUNK_BYTES {
                return Err(Error::invalid(format!("the checksums of a record do not join at byte {offset}")));
            }
            let shift = shifts.entry(part.bytes).or_insert_with(|| Shift::by(part.bytes));
            whole = whole.joined(part, shift);
            chunk = chunk.joined(part, shift);
            if chunk.bytes == CHUNK_BYTES {
                chunks.push(std::mem::replace(&mut chunk, PartChecksums::EMPTY).crc64);
            }
        }
        if chunk.bytes > 0 {
            chunks.push(chunk.crc64);
        }
        Ok(Self { crc32: whole.crc32, chunks })
    }
}

/// Returns the number of chunks of `bytes`.
#[must_use]
pub fn chunk_count(bytes: u64) -> usize {
    bytes.div_ceil(CHUNK_BYTES) as usize
}

/// Returns the length that the chunks of `bytes` add to the text of [`encode`]. Allocates nothing: a tensor may claim
/// so many bytes that its checksums do not fit in memory.
#[must_use]
pub fn text_bytes(bytes: u64) -> u64 {
    bytes.div_ceil(CHUNK_BYTES) * HEX_DIGITS as u64
}

/// The entry of a record in the sidecar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SidecarRecord {
    /// Name of the record.
    pub name: String,
    /// CRC-64/NVME of each chunk.
    pub chunks: Vec<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WireV1 {
    #[serde(rename = "version")]
    _version: u32,
    algorithm: String,
    #[serde(rename = "cell_bytes")]
    chunk_bytes: u64,
    records: json::Object<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wire<R> {
    version: u32,
    index: String,
    #[serde(rename = "self")]
    own: String,
    /// Sixteen digits, as for all checksums, so that the length of the text does not depend on the numbers.
    file_bytes: String,
    index_offset: String,
    index_bytes: String,
    algorithm: String,
    #[serde(rename = "cell_bytes")]
    chunk_bytes: u64,
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
/// The start of a sidecar. The checksum of the index follows.
const HEAD: &str = r#"{"version":2,"index":""#;
/// The text between the checksum of the index and that of the sidecar.
const BETWEEN: &str = r#"","self":""#;
/// [`HEAD`] as the header of a safetensors file has it.
const QUOTED_HEAD: &str = r#""deepnvme.checksums":"{\"version\":2,\"index\":\""#;

/// The size of a file and the position of its index. It distinguishes the file from others that contain the same
/// bytes elsewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Frame {
    /// Length of the file in bytes.
    pub file_bytes: u64,
    /// Offset of the index: the header of a safetensors file, or the sidecar of an archive and everything after it.
    pub index_offset: u64,
    /// Length of the index in bytes.
    pub index_bytes: u64,
}

/// A frame, and the checksum of its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexChecksum {
    /// The file of the checksum.
    pub frame: Frame,
    /// CRC-64/NVME of the index, without the digits of this checksum.
    pub index_crc64: u64,
}

/// The contents of a sidecar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sidecar {
    /// The records, in file order.
    pub records: Vec<SidecarRecord>,
    /// The checksum of the rest of the file. Version 1 has none: names, types and shapes are not covered.
    pub index: Option<IndexChecksum>,
}

/// Position of the index's checksum in the text of a sidecar.
pub const INDEX_DIGITS: Range<usize> = HEAD.len()..HEAD.len() + HEX_DIGITS;
const SIDECAR_DIGITS: Range<usize> = INDEX_DIGITS.end + BETWEEN.len()..INDEX_DIGITS.end + BETWEEN.len() + HEX_DIGITS;

/// Encodes a sidecar for records and their chunks, in a file of that frame. The checksum of the index is blank;
/// [`write_index_checksum`] writes it. The length depends only on names and numbers of chunks, so that space can be
/// reserved.
#[must_use]
pub fn encode<'a>(records: impl Iterator<Item = (&'a str, &'a [u64])> + Clone, frame: Frame) -> String {
    let digits = records.map(|(name, chunks)| (name, chunks.iter().flat_map(|chunk| hex(*chunk)).collect::<String>()));
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
        chunk_bytes: CHUNK_BYTES,
        records,
    };
    let mut text = serde_json::to_string(&wire).unwrap_or_default();
    let own: String = hex(sidecar_crc64(text.as_bytes())).collect();
    text.replace_range(SIDECAR_DIGITS, &own);
    text
}

/// Formats a number as sixteen hexadecimal digits.
pub(crate) fn hex(chunk: u64) -> impl Iterator<Item = char> {
    (0..HEX_DIGITS as u32).rev().filter_map(move |place| char::from_digit((chunk >> (4 * place) & 15) as u32, 16))
}

/// Parses the digits at a position. Each number has one spelling, so every changed digit is noticed.
pub(crate) fn parse_digits(text: &[u8], place: Range<usize>) -> Option<u64> {
    let digits = std::str::from_utf8(text.get(place)?).ok()?;
    let sum = u64::from_str_radix(digits, 16).ok()?;
    hex(sum).eq(digits.chars()).then_some(sum)
}

/// Returns the checksum of a sidecar's text, without the two checksums at its start.
fn sidecar_crc64(text: &[u8]) -> u64 {
    covered_sum(text, &[INDEX_DIGITS, SIDECAR_DIGITS])
}

/// Returns the CRC-64/NVME of bytes without the `holes`, which are ordered and do not overlap.
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

/// Writes the checksum of an index, without its `holes`, into `digits`.
pub fn write_index_checksum(index: &mut [u8], digits: Range<usize>, holes: &[Range<usize>]) {
    let sum = covered_sum(index, holes);
    for (place, digit) in index[digits].iter_mut().zip(hex(sum)) {
        *place = digit as u8;
    }
}

/// Returns the position of the index's checksum in a safetensors header, if deepnvme wrote it.
#[must_use]
pub fn quoted_digits(header: &[u8]) -> Option<Range<usize>> {
    let head = QUOTED_HEAD.as_bytes();
    // In a name that resembles it the quotes are escaped.
    let start = header.windows(head.len()).position(|window| window == head)? + head.len();
    (start + HEX_DIGITS <= header.len()).then_some(start..start + HEX_DIGITS)
}

/// Parses a sidecar.
///
/// # Errors
/// `Corrupt` for a text that is not a sidecar or was changed; `Unsupported` for a later version, another algorithm or
/// another chunk size; `Memory` if there is too little for the text.
pub fn decode(text: &[u8]) -> Result<Sidecar> {
    Error::check_memory("the checksums", text.len(), JSON_MEMORY_FACTOR)?;
    let no_json = |error| Error::corrupt(0, format!("the checksums are not valid JSON of deepnvme: {error}"));
    let Version { version } = serde_json::from_slice(text).map_err(no_json)?;
    let (algorithm, chunk_bytes, records, index) = match version {
        1 => {
            let wire: WireV1 = serde_json::from_slice(text).map_err(no_json)?;
            (wire.algorithm, wire.chunk_bytes, wire.records, None)
        }
        VERSION => {
            let wire: Wire<json::Object<String>> = serde_json::from_slice(text).map_err(no_json)?;
            let is_as_written = text.starts_with(HEAD.as_bytes())
                && text.get(INDEX_DIGITS.end..SIDECAR_DIGITS.start) == Some(BETWEEN.as_bytes())
                && parse_digits(text, SIDECAR_DIGITS) == Some(sidecar_crc64(text));
            let numbers = [&wire.file_bytes, &wire.index_offset, &wire.index_bytes];
            let [file_bytes, index_offset, index_bytes] =
                numbers.map(|digits| parse_digits(digits.as_bytes(), 0..HEX_DIGITS).filter(|_| is_as_written));
            let index = (|| {
                let frame = Frame { file_bytes: file_bytes?, index_offset: index_offset?, index_bytes: index_bytes? };
                Some(IndexChecksum { frame, index_crc64: parse_digits(text, INDEX_DIGITS)? })
            })();
            if index.is_none() {
                return Err(Error::corrupt(0, "the checksums themselves are not those that were saved"));
            }
            (wire.algorithm, wire.chunk_bytes, wire.records, index)
        }
        _ => return Err(later(&format!("checksums of version {version}"))),
    };
    if algorithm != ALGORITHM || chunk_bytes != CHUNK_BYTES {
        return Err(later(&format!("checksums of version {version}, {algorithm} over {chunk_bytes} bytes")));
    }
    let records = records.0.into_iter().map(|(name, digits)| {
        let is_hex = digits.len() % HEX_DIGITS == 0 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        if !is_hex {
            return Err(Error::corrupt(0, format!("the checksums of {name:?} are not hexadecimal numbers")));
        }
        let chunks = (0..digits.len()).step_by(HEX_DIGITS);
        let chunks = chunks.map(|at| u64::from_str_radix(&digits[at..at + HEX_DIGITS], 16).unwrap_or_default());
        Ok(SidecarRecord { name, chunks: chunks.collect() })
    });
    Ok(Sidecar { records: records.collect::<Result<_>>()?, index })
}

fn later(what: &str) -> Error {
    Error::unsupported(format!("{what}; a later deepnvme wrote them: upgrade deepnvme, or load without verification"))
}

/// A polynomial over GF(2) without its highest term, bits reflected, as wide as its checksum.
#[derive(Clone, Copy)]
struct Polynomial {
    reflected: u64,
    bits: u32,
}

impl Polynomial {
    const CRC32: Self = Self { reflected: 0xEDB8_8320, bits: 32 };
    const CRC64: Self = Self { reflected: 0x9A6C_9329_AC4B_C9B5, bits: 64 };

    /// Returns the product of two polynomials modulo this one. The highest bit represents 1.
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

    /// Returns x to the power of eight times `bytes`, by squaring. Multiplying a checksum by it appends that many
    /// zero bytes (the inversions of the standards cancel out).
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
