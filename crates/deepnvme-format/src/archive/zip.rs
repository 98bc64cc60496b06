//! The words of the ZIP format: headers as bytes, and bytes as headers. Little-endian throughout.

use crate::error::{Error, Result};

pub(super) const LOCAL_MAGIC: u32 = 0x0403_4b50;
const CENTRAL_MAGIC: u32 = 0x0201_4b50;
pub(super) const END_MAGIC: u32 = 0x0605_4b50;
const END64_MAGIC: u32 = 0x0606_4b50;
const LOCATOR_MAGIC: u32 = 0x0706_4b50;

/// Bytes of a local header without its name and its extra field.
pub const LOCAL_BYTES: u64 = 30;
const CENTRAL_BYTES: usize = 46;
pub(super) const END_BYTES: usize = 22;
const END64_BYTES: usize = 56;
pub(super) const LOCATOR_BYTES: usize = 20;

/// The extra field with 64-bit sizes.
const EXTRA_ZIP64: u16 = 1;
/// The extra field that torch pads with: "FB".
const EXTRA_PADDING: u16 = 0x4246;
/// Tag and length of an extra field.
pub(super) const EXTRA_HEAD_BYTES: u64 = 4;
/// The 64-bit field of a local header: two sizes.
pub(super) const LOCAL64_BYTES: u64 = EXTRA_HEAD_BYTES + 16;

const VERSION: u16 = 20;
const VERSION64: u16 = 45;
/// Names are UTF-8.
const FLAG_UTF8: u16 = 1 << 11;
const FLAG_ENCRYPTED: u16 = 1;
pub(super) const FLAG_DESCRIPTOR: u16 = 1 << 3;
/// 1 January 1980, midnight: archives of the same contents are the same bytes.
const DATE: u16 = 0x21;

/// Whether a number needs the 64-bit form.
pub(super) fn is_wide(number: u64) -> bool {
    number >= u64::from(u32::MAX)
}

fn narrow(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

fn put16(bytes: &mut Vec<u8>, number: u16) {
    bytes.extend_from_slice(&number.to_le_bytes());
}

fn put32(bytes: &mut Vec<u8>, number: u32) {
    bytes.extend_from_slice(&number.to_le_bytes());
}

fn put64(bytes: &mut Vec<u8>, number: u64) {
    bytes.extend_from_slice(&number.to_le_bytes());
}

/// What a record's header says.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry<'a> {
    pub(super) name: &'a str,
    pub(super) bytes: u64,
    pub(super) crc32: u32,
    pub(super) header_offset: u64,
}

fn put_common(bytes: &mut Vec<u8>, entry: &Entry<'_>, is_wide: bool) {
    put16(bytes, if is_wide { VERSION64 } else { VERSION });
    put16(bytes, FLAG_UTF8);
    put16(bytes, 0); // stored
    put16(bytes, 0);
    put16(bytes, DATE);
    put32(bytes, entry.crc32);
}

/// The header in front of a record, padded to `header_bytes`.
pub(super) fn local(entry: &Entry<'_>, header_bytes: u64) -> Vec<u8> {
    let is_wide = is_wide(entry.bytes);
    let mut bytes = Vec::with_capacity(header_bytes as usize);
    let extra_bytes = header_bytes - LOCAL_BYTES - entry.name.len() as u64;
    put32(&mut bytes, LOCAL_MAGIC);
    put_common(&mut bytes, entry, is_wide);
    let size = if is_wide { u32::MAX } else { narrow(entry.bytes) };
    put32(&mut bytes, size);
    put32(&mut bytes, size);
    put16(&mut bytes, entry.name.len() as u16);
    put16(&mut bytes, extra_bytes as u16);
    bytes.extend_from_slice(entry.name.as_bytes());
    let mut padding = extra_bytes;
    if is_wide {
        put16(&mut bytes, EXTRA_ZIP64);
        put16(&mut bytes, 16);
        put64(&mut bytes, entry.bytes);
        put64(&mut bytes, entry.bytes);
        padding -= LOCAL64_BYTES;
    }
    if padding > 0 {
        put16(&mut bytes, EXTRA_PADDING);
        put16(&mut bytes, (padding - EXTRA_HEAD_BYTES) as u16);
        bytes.resize(header_bytes as usize, b'Z');
    }
    bytes
}

/// A record's entry in the directory.
pub(super) fn central(entry: &Entry<'_>) -> Vec<u8> {
    let (wide_size, wide_offset) = (is_wide(entry.bytes), is_wide(entry.header_offset));
    let wide_bytes = if wide_size { 16 } else { 0 } + if wide_offset { 8 } else { 0 };
    let extra_bytes = if wide_bytes > 0 { EXTRA_HEAD_BYTES as u16 + wide_bytes } else { 0 };
    let mut bytes = Vec::with_capacity(CENTRAL_BYTES + entry.name.len() + usize::from(extra_bytes));
    put32(&mut bytes, CENTRAL_MAGIC);
    put16(&mut bytes, VERSION64);
    put_common(&mut bytes, entry, wide_bytes > 0);
    let size = if wide_size { u32::MAX } else { narrow(entry.bytes) };
    put32(&mut bytes, size);
    put32(&mut bytes, size);
    put16(&mut bytes, entry.name.len() as u16);
    put16(&mut bytes, extra_bytes);
    put16(&mut bytes, 0); // comment
    put16(&mut bytes, 0); // disk
    put16(&mut bytes, 0); // internal attributes
    put32(&mut bytes, 0); // external attributes
    put32(&mut bytes, narrow(entry.header_offset));
    bytes.extend_from_slice(entry.name.as_bytes());
    if wide_bytes > 0 {
        put16(&mut bytes, EXTRA_ZIP64);
        put16(&mut bytes, wide_bytes);
        if wide_size {
            put64(&mut bytes, entry.bytes);
            put64(&mut bytes, entry.bytes);
        }
        if wide_offset {
            put64(&mut bytes, entry.header_offset);
        }
    }
    bytes
}

/// What stands behind a directory of `directory_bytes` at `directory_offset`. Always with the 64-bit form, whose length
/// is then known before the numbers are.
pub(super) fn end(records: u64, directory_offset: u64, directory_bytes: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(END64_BYTES + LOCATOR_BYTES + END_BYTES);
    put32(&mut bytes, END64_MAGIC);
    put64(&mut bytes, END64_BYTES as u64 - 12);
    put16(&mut bytes, VERSION64);
    put16(&mut bytes, VERSION64);
    put32(&mut bytes, 0);
    put32(&mut bytes, 0);
    put64(&mut bytes, records);
    put64(&mut bytes, records);
    put64(&mut bytes, directory_bytes);
    put64(&mut bytes, directory_offset);
    put32(&mut bytes, LOCATOR_MAGIC);
    put32(&mut bytes, 0);
    put64(&mut bytes, directory_offset + directory_bytes);
    put32(&mut bytes, 1);
    put32(&mut bytes, END_MAGIC);
    put16(&mut bytes, 0);
    put16(&mut bytes, 0);
    let count = u16::try_from(records).unwrap_or(u16::MAX);
    put16(&mut bytes, count);
    put16(&mut bytes, count);
    put32(&mut bytes, narrow(directory_bytes));
    put32(&mut bytes, narrow(directory_offset));
    put16(&mut bytes, 0);
    bytes
}

/// Bytes of what [`end`] makes.
pub(super) const END_ALL_BYTES: u64 = (END64_BYTES + LOCATOR_BYTES + END_BYTES) as u64;

/// Bytes with a place in the file, taken one number after another.
#[derive(Clone, Copy)]
pub(super) struct Words<'a> {
    bytes: &'a [u8],
    at: usize,
    offset: u64,
}

impl<'a> Words<'a> {
    pub(super) fn new(bytes: &'a [u8], offset: u64) -> Self {
        Self { bytes, at: 0, offset }
    }

    pub(super) fn offset(&self) -> u64 {
        self.offset + self.at as u64
    }

    pub(super) fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let end = self.at.checked_add(count).filter(|end| *end <= self.bytes.len());
        let Some(end) = end else {
            return Err(Error::corrupt(self.offset(), "the ZIP directory ends in the middle of an entry"));
        };
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    pub(super) fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_le_bytes(self.take(2)?.try_into().unwrap_or_default()))
    }

    pub(super) fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.take(4)?.try_into().unwrap_or_default()))
    }

    pub(super) fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.take(8)?.try_into().unwrap_or_default()))
    }

    fn magic(&mut self, magic: u32, what: &str) -> Result<()> {
        let offset = self.offset();
        if self.u32()? == magic {
            return Ok(());
        }
        Err(Error::corrupt(offset, format!("there is no {what} where the ZIP directory says that one is")))
    }
}

/// The fields that both kinds of header begin with, from the flags on.
struct Common {
    flags: u16,
    crc32: u32,
    packed: u64,
    bytes: u64,
}

fn common(words: &mut Words<'_>) -> Result<Common> {
    let offset = words.offset();
    let flags = words.u16()?;
    let method = words.u16()?;
    words.take(4)?;
    let (crc32, packed, bytes) = (words.u32()?, words.u32()?, words.u32()?);
    if flags & FLAG_ENCRYPTED != 0 {
        return Err(Error::unsupported(format!(
            "the record at offset {offset} is encrypted; torch archives never are"
        )));
    }
    if method != 0 {
        let text = "is compressed, and torch archives never are; unpack the file with unzip, and pack it with zip -0";
        return Err(Error::unsupported(format!("the record at offset {offset} {text}")));
    }
    Ok(Common { flags, crc32, packed: packed.into(), bytes: bytes.into() })
}

/// Replaces each number that is all ones by the next one of the 64-bit extra field.
fn widen(extra: &[u8], offset: u64, numbers: &mut [&mut u64]) -> Result<()> {
    let mut words = Words::new(extra, offset);
    while words.at + EXTRA_HEAD_BYTES as usize <= extra.len() {
        let (tag, bytes) = (words.u16()?, words.u16()?);
        let mut field = Words::new(words.take(bytes.into())?, words.offset());
        if tag == EXTRA_ZIP64 {
            for number in numbers.iter_mut().filter(|number| ***number == u64::from(u32::MAX)) {
                **number = field.u64()?;
            }
        }
    }
    Ok(())
}

/// An entry of the directory, as it stands there.
pub(super) struct CentralEntry {
    pub(super) name: String,
    pub(super) flags: u16,
    pub(super) crc32: u32,
    pub(super) bytes: u64,
    pub(super) header_offset: u64,
}

pub(super) fn read_central(words: &mut Words<'_>) -> Result<CentralEntry> {
    let offset = words.offset();
    words.magic(CENTRAL_MAGIC, "entry")?;
    words.take(4)?;
    let Common { flags, crc32, mut packed, mut bytes } = common(words)?;
    let (name_bytes, extra_bytes, comment_bytes) = (words.u16()?, words.u16()?, words.u16()?);
    words.take(8)?;
    let mut header_offset = u64::from(words.u32()?);
    let name = std::str::from_utf8(words.take(name_bytes.into())?);
    let name = name.map_err(|_| Error::corrupt(offset, "a record's name is not UTF-8"))?.to_owned();
    let extra_offset = words.offset();
    let extra = words.take(extra_bytes.into())?;
    words.take(comment_bytes.into())?;
    widen(extra, extra_offset, &mut [&mut bytes, &mut packed, &mut header_offset])?;
    if packed != bytes {
        return Err(Error::corrupt(offset, format!("the record {name:?} has {bytes} bytes and {packed} in the file")));
    }
    Ok(CentralEntry { name, flags, crc32, bytes, header_offset })
}

/// A local header, as it stands in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The record's name.
    pub name: Vec<u8>,
    /// Bytes of the header: where the record's own begin.
    pub header_bytes: u64,
}

impl Header {
    /// Reads the header at the beginning of `bytes`, which stand at `offset` of the file. `None` when there are too few.
    ///
    /// # Errors
    /// `Corrupt` where there is no header.
    pub fn parse(bytes: &[u8], offset: u64) -> Result<Option<Self>> {
        if bytes.len() < LOCAL_BYTES as usize {
            return Ok(None);
        }
        let mut words = Words::new(bytes, offset);
        words.magic(LOCAL_MAGIC, "record")?;
        words.take(2)?;
        common(&mut words)?;
        let (name_bytes, extra_bytes) = (words.u16()?, words.u16()?);
        let header_bytes = LOCAL_BYTES + u64::from(name_bytes) + u64::from(extra_bytes);
        let Ok(name) = words.take(name_bytes.into()) else { return Ok(None) };
        Ok(Some(Self { name: name.to_vec(), header_bytes }))
    }
}

/// Where the directory is.
pub(super) struct EndFields {
    pub(super) records: u64,
    pub(super) directory_bytes: u64,
    pub(super) directory_offset: u64,
}

/// The end record at `at` of `tail`, with the 64-bit one in front of it if there is one.
pub(super) fn read_end(tail: &[u8], at: usize, tail_offset: u64) -> Result<EndFields> {
    let offset = tail_offset + at as u64;
    let mut words = Words::new(&tail[at..], offset);
    words.magic(END_MAGIC, "end")?;
    let (disk, directory_disk) = (words.u16()?, words.u16()?);
    if disk != 0 || directory_disk != 0 {
        return Err(Error::unsupported("the ZIP file is one of several volumes; torch archives never are"));
    }
    words.u16()?;
    let mut fields = EndFields {
        records: words.u16()?.into(),
        directory_bytes: words.u32()?.into(),
        directory_offset: words.u32()?.into(),
    };
    let Some(locator_at) = at.checked_sub(LOCATOR_BYTES) else { return Ok(fields) };
    let mut locator = Words::new(&tail[locator_at..at], tail_offset + locator_at as u64);
    if locator.magic(LOCATOR_MAGIC, "locator").is_err() {
        return Ok(fields);
    }
    locator.take(4)?;
    let end64_offset = locator.u64()?;
    let end64_at = end64_offset.checked_sub(tail_offset).filter(|at| *at < locator_at as u64);
    let Some(end64_at) = end64_at else {
        return Err(Error::corrupt(offset, "the 64-bit end of the ZIP directory lies elsewhere than in front of it"));
    };
    let mut words = Words::new(&tail[end64_at as usize..locator_at], end64_offset);
    words.magic(END64_MAGIC, "64-bit end")?;
    words.take(20)?;
    words.u64()?;
    fields = EndFields { records: words.u64()?, directory_bytes: words.u64()?, directory_offset: words.u64()? };
    Ok(fields)
}
