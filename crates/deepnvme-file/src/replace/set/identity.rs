//! Marks of files: their identities, as intents and records state them.

use std::path::Path;

use crate::replace::temporary::mark_of;
use deepnvme_io::fs::{self, FileKind, Stat};

/// Returns the mark of a member that was written to the end, with its modification time.
pub(super) fn written_mark(stat: &Stat) -> String {
    format!("{}-{:x}", mark_of(stat), stat.modified_ns)
}

/// Returns whether the mark is this file's.
pub(super) fn is_marked(stat: &Stat, mark: &str) -> bool {
    let rest = mark.strip_prefix(&mark_of(stat));
    stat.kind == FileKind::File && rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

/// Returns whether nobody has written to the file since it got its mark. The time may be older than the mark's: disks
/// keep it with less precision than memory, and a power cut may bring back an earlier one.
pub(super) fn is_as_written(stat: &Stat, mark: &str) -> bool {
    let modified_ns = mark.split('-').nth(2).map(|modified_ns| i128::from_str_radix(modified_ns, 16));
    modified_ns.is_none_or(|modified_ns| modified_ns.is_ok_and(|modified_ns| stat.modified_ns <= modified_ns))
}

/// Returns the mark of a file's folder.
pub(super) fn folder_mark(path: &Path) -> Option<String> {
    fs::stat(fs::folder_of(path)).ok().map(|stat| mark_of(&stat))
}

pub(super) fn name_of(path: &Path) -> &[u8] {
    path.file_name().unwrap_or_default().as_encoded_bytes()
}
