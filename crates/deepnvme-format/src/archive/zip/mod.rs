//! ZIP headers, little-endian: `write` encodes them, `read` parses them.

mod read;
mod write;

pub use read::LocalHeader;
pub(super) use read::{CentralEntry, Words, read_central, read_end};
pub(super) use write::{END_ALL_BYTES, Entry, end, local, put_central};

pub(super) const LOCAL_MAGIC: u32 = 0x0403_4b50;
const CENTRAL_MAGIC: u32 = 0x0201_4b50;
pub(super) const END_MAGIC: u32 = 0x0605_4b50;
const END64_MAGIC: u32 = 0x0606_4b50;
const LOCATOR_MAGIC: u32 = 0x0706_4b50;

/// Bytes of a local header without name and extra field.
pub const LOCAL_BYTES: u64 = 30;
/// Bytes of a directory entry without name, extra field and comment.
pub(super) const CENTRAL_BYTES: u64 = 46;
pub(super) const END_BYTES: usize = 22;
const END64_BYTES: usize = 56;
pub(super) const LOCATOR_BYTES: usize = 20;

/// The ZIP64 extra field.
const EXTRA_ZIP64: u16 = 1;
/// torch's padding field: "FB".
const EXTRA_PADDING: u16 = 0x4246;
/// Tag and length of an extra field.
pub(super) const EXTRA_HEAD_BYTES: u64 = 4;
/// The ZIP64 field of a local header: two sizes.
pub(super) const LOCAL64_BYTES: u64 = EXTRA_HEAD_BYTES + 16;

const VERSION: u16 = 20;
const VERSION64: u16 = 45;
/// Names are UTF-8.
const FLAG_UTF8: u16 = 1 << 11;
const FLAG_ENCRYPTED: u16 = 1;
pub(super) const FLAG_DESCRIPTOR: u16 = 1 << 3;
/// 1 January 1980: archives with the same contents are identical.
const DATE: u16 = 0x21;

/// Whether a number needs ZIP64.
pub(super) fn is_wide(number: u64) -> bool {
    number >= u64::from(u32::MAX)
}
