//! Identities of files, as intents and records state them.

use std::path::Path;

use deepnvme_io::fs::{self, FileKind, Stat};

/// Returns the identity of a file, as records state it. Omits the device number, which changes when disks are
/// remounted.
pub(super) fn mark(stat: &Stat) -> String {
    format!("{:x}-{:x}", stat.identity.inode, stat.born_ns.unwrap_or(0))
}

/// Returns the identity of a member that was written to the end, with its modification time.
pub(super) fn written_mark(stat: &Stat) -> String {
    format!("{}-{:x}", mark(stat), stat.modified_ns)
}

/// Returns whether a record means this file.
pub(super) fn is_marked(stat: &Stat, stated: &str) -> bool {
    let rest = stated.strip_prefix(&mark(stat));
    stat.kind == FileKind::File && rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

/// Returns whether nobody has written to the file since its record. The time may be older than the record's: disks keep
/// it with less precision than memory, and a power cut may bring back an earlier one.
pub(super) fn is_as_written(stat: &Stat, stated: &str) -> bool {
    let modified_ns = stated.split('-').nth(2).map(|modified_ns| i128::from_str_radix(modified_ns, 16));
    modified_ns.is_none_or(|modified_ns| modified_ns.is_ok_and(|modified_ns| stat.modified_ns <= modified_ns))
}

/// Returns the identity of a file's folder.
pub(super) fn folder_mark(path: &Path) -> Option<String> {
    fs::stat(fs::folder_of(path)).ok().map(|stat| mark(&stat))
}

pub(super) fn name_of(path: &Path) -> &[u8] {
    path.file_name().unwrap_or_default().as_encoded_bytes()
}
