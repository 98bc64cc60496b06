//! Encodes ZIP headers with the planned lengths.

use super::{
    CENTRAL_MAGIC, DATE, END_BYTES, END_MAGIC, END64_BYTES, END64_MAGIC, EXTRA_HEAD_BYTES, EXTRA_PADDING, EXTRA_ZIP64,
    FLAG_UTF8, LOCAL_BYTES, LOCAL_MAGIC, LOCAL64_BYTES, LOCATOR_BYTES, LOCATOR_MAGIC, VERSION, VERSION64, is_wide,
};

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

/// The values of a record's header.
#[derive(Clone, Copy, Debug)]
pub(in crate::archive) struct Entry<'a> {
    pub(in crate::archive) name: &'a str,
    pub(in crate::archive) bytes: u64,
    pub(in crate::archive) crc32: u32,
    pub(in crate::archive) header_offset: u64,
}

fn put_common(bytes: &mut Vec<u8>, entry: &Entry<'_>, is_wide: bool) {
    put16(bytes, if is_wide { VERSION64 } else { VERSION });
    put16(bytes, FLAG_UTF8);
    put16(bytes, 0); // stored
    put16(bytes, 0);
    put16(bytes, DATE);
    put32(bytes, entry.crc32);
}

/// Returns a record's local header, padded to `header_bytes`.
pub(in crate::archive) fn local(entry: &Entry<'_>, header_bytes: u64) -> Vec<u8> {
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

/// Appends a record's directory entry.
pub(in crate::archive) fn put_central(bytes: &mut Vec<u8>, entry: &Entry<'_>) {
    let (wide_size, wide_offset) = (is_wide(entry.bytes), is_wide(entry.header_offset));
    let wide_bytes = if wide_size { 16 } else { 0 } + if wide_offset { 8 } else { 0 };
    let extra_bytes = if wide_bytes > 0 { EXTRA_HEAD_BYTES as u16 + wide_bytes } else { 0 };
    put32(bytes, CENTRAL_MAGIC);
    put16(bytes, VERSION64);
    put_common(bytes, entry, wide_bytes > 0);
    let size = if wide_size { u32::MAX } else { narrow(entry.bytes) };
    put32(bytes, size);
    put32(bytes, size);
    put16(bytes, entry.name.len() as u16);
    put16(bytes, extra_bytes);
    put16(bytes, 0); // comment
    put16(bytes, 0); // disk
    put16(bytes, 0); // internal attributes
    put32(bytes, 0); // external attributes
    put32(bytes, narrow(entry.header_offset));
    bytes.extend_from_slice(entry.name.as_bytes());
    if wide_bytes > 0 {
        put16(bytes, EXTRA_ZIP64);
        put16(bytes, wide_bytes);
        if wide_size {
            put64(bytes, entry.bytes);
            put64(bytes, entry.bytes);
        }
        if wide_offset {
            put64(bytes, entry.header_offset);
        }
    }
}

/// Returns the end records of a directory. They always include ZIP64, so that their length is known in advance.
pub(in crate::archive) fn end(records: u64, directory_offset: u64, directory_bytes: u64) -> Vec<u8> {
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

/// Length of the result of [`end`].
pub(in crate::archive) const END_ALL_BYTES: u64 = (END64_BYTES + LOCATOR_BYTES + END_BYTES) as u64;
