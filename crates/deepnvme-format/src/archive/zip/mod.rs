//! The words of the ZIP format, little-endian throughout: `write` makes bytes of headers, `read` headers of bytes.

mod read;
mod write;

pub use read::Header;
pub(super) use read::{CentralEntry, Words, read_central, read_end};
pub(super) use write::{END_ALL_BYTES, Entry, end, local, put_central};

pub(super) const LOCAL_MAGIC: u32 = 0x0403_4b50;
const CENTRAL_MAGIC: u32 = 0x0201_4b50;
pub(super) const END_MAGIC: u32 = 0x0605_4b50;
const END64_MAGIC: u32 = 0x0606_4b50;
const LOCATOR_MAGIC: u32 = 0x0706_4b50;

/// Bytes of a local header without its name and its extra field.
pub const LOCAL_BYTES: u64 = 30;
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
