//! Parses ZIP headers. Errors about one header name its offset.

use super::{
    CENTRAL_MAGIC, END_MAGIC, END64_MAGIC, EXTRA_HEAD_BYTES, EXTRA_ZIP64, FLAG_ENCRYPTED, LOCAL_BYTES, LOCAL_MAGIC,
    LOCATOR_BYTES, LOCATOR_MAGIC,
};
use crate::error::{Error, Result};

/// A reader of little-endian numbers that knows its offset in the file.
#[derive(Clone, Copy)]
pub(in crate::archive) struct Words<'a> {
    bytes: &'a [u8],
    at: usize,
    offset: u64,
    /// The structure that the bytes are part of, as errors name it.
    structure: &'static str,
}

impl<'a> Words<'a> {
    pub(in crate::archive) fn new(bytes: &'a [u8], offset: u64, structure: &'static str) -> Self {
        Self { bytes, at: 0, offset, structure }
    }

    pub(in crate::archive) fn offset(&self) -> u64 {
        self.offset + self.at as u64
    }

    pub(in crate::archive) fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let end = self.at.checked_add(count).filter(|end| *end <= self.bytes.len());
        let Some(end) = end else {
            return Err(Error::corrupt(self.offset(), format!("{} ends in the middle of a field", self.structure)));
        };
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    pub(in crate::archive) fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_le_bytes(self.take(2)?.try_into().unwrap_or_default()))
    }

    pub(in crate::archive) fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.take(4)?.try_into().unwrap_or_default()))
    }

    pub(in crate::archive) fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.take(8)?.try_into().unwrap_or_default()))
    }

    /// Reads a magic number. `missing` is the error for another one.
    fn magic(&mut self, magic: u32, missing: &'static str) -> Result<()> {
        let offset = self.offset();
        if self.u32()? == magic {
            return Ok(());
        }
        Err(Error::corrupt(offset, missing))
    }
}

/// The fields that both kinds of header share, from the flags on.
struct Common {
    flags: u16,
    crc32: u32,
    compressed_bytes: u64,
    uncompressed_bytes: u64,
}

fn common(words: &mut Words<'_>) -> Result<Common> {
    let offset = words.offset();
    let flags = words.u16()?;
    let method = words.u16()?;
    words.take(4)?;
    let (crc32, compressed_bytes, uncompressed_bytes) = (words.u32()?, words.u32()?, words.u32()?);
    if flags & FLAG_ENCRYPTED != 0 {
        return Err(Error::unsupported(format!(
            "the record at offset {offset} is encrypted; torch archives never are"
        )));
    }
    if method != 0 {
        let text = "is compressed, and torch archives never are; unpack the file with unzip, and pack it with zip -0";
        return Err(Error::unsupported(format!("the record at offset {offset} {text}")));
    }
    Ok(Common {
        flags,
        crc32,
        compressed_bytes: compressed_bytes.into(),
        uncompressed_bytes: uncompressed_bytes.into(),
    })
}

/// Replaces each number of all ones by the next value of the ZIP64 extra field.
fn apply_zip64_extra(extra: &[u8], offset: u64, numbers: &mut [&mut u64]) -> Result<()> {
    let mut words = Words::new(extra, offset, "the extra field of a ZIP entry");
    while words.at + EXTRA_HEAD_BYTES as usize <= extra.len() {
        let (tag, bytes) = (words.u16()?, words.u16()?);
        let mut field = Words::new(words.take(bytes.into())?, words.offset(), "the ZIP64 extra field");
        if tag == EXTRA_ZIP64 {
            for number in numbers.iter_mut().filter(|number| ***number == u64::from(u32::MAX)) {
                **number = field.u64()?;
            }
        }
    }
    Ok(())
}

/// A raw directory entry.
pub(in crate::archive) struct CentralEntry {
    pub(in crate::archive) name: String,
    pub(in crate::archive) flags: u16,
    pub(in crate::archive) crc32: u32,
    pub(in crate::archive) bytes: u64,
    pub(in crate::archive) header_offset: u64,
}

pub(in crate::archive) fn read_central(words: &mut Words<'_>) -> Result<CentralEntry> {
    let offset = words.offset();
    words.magic(CENTRAL_MAGIC, "no entry where the ZIP directory should have one")?;
    words.take(4)?;
    let Common { flags, crc32, mut compressed_bytes, mut uncompressed_bytes } = common(words)?;
    let (name_bytes, extra_bytes, comment_bytes) = (words.u16()?, words.u16()?, words.u16()?);
    words.take(8)?;
    let mut header_offset = u64::from(words.u32()?);
    let name = std::str::from_utf8(words.take(name_bytes.into())?);
    let name = name.map_err(|_| Error::corrupt(offset, "a record's name is not UTF-8"))?.to_owned();
    let extra_offset = words.offset();
    let extra = words.take(extra_bytes.into())?;
    words.take(comment_bytes.into())?;
    apply_zip64_extra(extra, extra_offset, &mut [&mut uncompressed_bytes, &mut compressed_bytes, &mut header_offset])?;
    if compressed_bytes != uncompressed_bytes {
        let what = format!("the record {name:?} has {uncompressed_bytes} bytes, but {compressed_bytes} in the file");
        return Err(Error::corrupt(offset, what));
    }
    Ok(CentralEntry { name, flags, crc32, bytes: uncompressed_bytes, header_offset })
}

/// A raw local header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalHeader {
    /// Name of the record.
    pub name: Vec<u8>,
    /// Bytes of the header. The record's data follows.
    pub header_bytes: u64,
}

impl LocalHeader {
    /// Parses the header at the start of `bytes`, which are at `offset` in the file. Returns `None` if they are too
    /// few.
    ///
    /// # Errors
    /// `Corrupt` if there is no header; `Unsupported` if the record is compressed or encrypted.
    pub fn parse(bytes: &[u8], offset: u64) -> Result<Option<Self>> {
        if bytes.len() < LOCAL_BYTES as usize {
            return Ok(None);
        }
        let mut words = Words::new(bytes, offset, "the header of a ZIP record");
        words.magic(LOCAL_MAGIC, "no record at the offset in the ZIP directory")?;
        words.take(2)?;
        common(&mut words)?;
        let (name_bytes, extra_bytes) = (words.u16()?, words.u16()?);
        let header_bytes = LOCAL_BYTES + u64::from(name_bytes) + u64::from(extra_bytes);
        let Ok(name) = words.take(name_bytes.into()) else { return Ok(None) };
        Ok(Some(Self { name: name.to_vec(), header_bytes }))
    }
}

/// The location of the directory.
pub(in crate::archive) struct EndFields {
    pub(in crate::archive) records: u64,
    pub(in crate::archive) directory_bytes: u64,
    pub(in crate::archive) directory_offset: u64,
}

/// Parses the end record at `at` of `tail`, and the ZIP64 end record before it if there is one.
pub(in crate::archive) fn read_end(tail: &[u8], at: usize, tail_offset: u64) -> Result<EndFields> {
    let offset = tail_offset + at as u64;
    let mut words = Words::new(&tail[at..], offset, "the ZIP end record");
    words.magic(END_MAGIC, "no ZIP end record")?;
    let (disk, directory_disk) = (words.u16()?, words.u16()?);
    if disk != 0 || directory_disk != 0 {
        return Err(Error::unsupported("the ZIP file is part of a multi-volume archive, which torch does not write"));
    }
    words.u16()?;
    let mut fields = EndFields {
        records: words.u16()?.into(),
        directory_bytes: words.u32()?.into(),
        directory_offset: words.u32()?.into(),
    };
    let Some(locator_at) = at.checked_sub(LOCATOR_BYTES) else { return Ok(fields) };
    let mut locator = Words::new(&tail[locator_at..at], tail_offset + locator_at as u64, "the ZIP64 locator");
    if locator.magic(LOCATOR_MAGIC, "no ZIP64 locator").is_err() {
        return Ok(fields);
    }
    locator.take(4)?;
    let end64_offset = locator.u64()?;
    let end64_at = end64_offset.checked_sub(tail_offset).filter(|at| *at < locator_at as u64);
    let Some(end64_at) = end64_at else {
        return Err(Error::corrupt(offset, "the ZIP64 end record is not before the end record"));
    };
    let mut words = Words::new(&tail[end64_at as usize..locator_at], end64_offset, "the ZIP64 end record");
    words.magic(END64_MAGIC, "no ZIP64 end record at the offset that its locator gives")?;
    words.take(20)?;
    words.u64()?;
    fields = EndFields { records: words.u64()?, directory_bytes: words.u64()?, directory_offset: words.u64()? };
    Ok(fields)
}
