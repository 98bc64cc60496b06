//! The files of a folder: the renaming of new ones, and the removal of retired ones that verify.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use deepnvme_format::file_list::{self, FileFingerprint};
use deepnvme_format::safetensors::{HEADER_BYTES_MAX, LENGTH_BYTES};
use deepnvme_io::fs::{self, FileKind, OFlags, Stat};
use deepnvme_io::op::Errno;
use deepnvme_io::{Error as IoError, Result as IoResult};

use super::manifest::{ManifestEntry, Part};
use super::members;
use super::names::SHARDS_LIST;
use super::private::Stated;
use crate::summed::crc64;

/// Bytes at the start of a part that its checksum covers.
pub const HEAD_BYTES: u64 = 64 << 10;
/// Maximum size of a list of parts or an index of shards.
const LIST_BYTES_MAX: u64 = 1 << 30;

/// The outcome of removing a retired checkpoint's files from one folder.
#[derive(Debug, Default)]
pub(super) struct Removal {
    /// Names of files that differ from the manifest's record. They stay.
    pub foreign: Vec<String>,
    /// Texts about files that could not be examined or removed. These are retried.
    pub failures: Vec<String>,
    /// Open files without a name. Closing them frees their space, which may take long.
    pub held: Vec<OwnedFd>,
}

/// Returns whether any file of a checkpoint is in the folder, under its final or private name. A file that cannot be
/// examined counts as present.
///
/// Checks the private name first: a file that is renamed in between would otherwise be missed under both.
#[must_use]
pub(super) fn is_there(folder: &Path, entry: &ManifestEntry) -> bool {
    let private = entry.pending.get(&entry.file);
    private.into_iter().chain([&entry.file]).any(|name| !fs::is_absent(&folder.join(name)))
}

/// Renames the files of a checkpoint in this folder to their final names. Returns the names that other files have.
/// Idempotent, so any process that has read the manifest may call it.
///
/// # Errors
/// The error of the kernel.
pub(super) fn place(folder: &Path, entry: &ManifestEntry) -> IoResult<Vec<String>> {
    let mut in_the_way = Vec::new();
    for (name, private) in &entry.pending {
        let (from, to) = (folder.join(private), folder.join(name));
        let is_ours = fs::stat_link(&from).and_then(|stat| is_pending(&from, &stat, private, name, entry));
        match is_ours.and_then(|is_ours| if is_ours { rename_new(&from, &to) } else { Err(Errno::NOENT) }) {
            // It has its final name already, or lies on another machine.
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::EXIST) => in_the_way.push(name.clone()),
            Err(errno) => return Err(IoError::os("rename", errno).at_path(to)),
        }
    }
    Ok(in_the_way)
}

/// Returns whether the file with a private name is the recorded one. Once the file has its final name, its private name
/// is free and may be taken by another file. A copy of the folder contains other files with the same content.
fn is_pending(path: &Path, stat: &Stat, private: &str, name: &str, entry: &ManifestEntry) -> Result<bool, Errno> {
    match Stated::by(private, stat) {
        Stated::This | Stated::Nothing => Ok(true),
        Stated::Another => is_as_listed(path, name, entry),
    }
}

/// Returns the latest modification time of the files of a checkpoint that has no parts, in nanoseconds since 1970.
///
/// # Errors
/// The error of the kernel, even if a file is missing.
pub(super) fn written_ns(folder: &Path, entry: &ManifestEntry) -> IoResult<i64> {
    let modified_ns = |path: &Path| {
        // NFS refreshes the time of a file that other machines wrote when it is opened.
        let file = fs::open(path, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY, 0);
        let stat = file.and_then(|file| fs::stat_of(file.as_fd()));
        let stat = stat.map_err(|errno| IoError::os("stat", errno).at_path(path))?;
        // Times up to the year 2262.
        Ok(i64::try_from(stat.modified_ns).unwrap_or(i64::MAX))
    };
    let path = folder.join(entry.pending.get(&entry.file).unwrap_or(&entry.file));
    if !entry.is_folder() {
        return modified_ns(&path);
    }
    let index = path.join(SHARDS_LIST);
    let shards = members::shards(&fs::read_small(&index, LIST_BYTES_MAX)?).unwrap_or_default();
    // The clocks of the machines that wrote the shards may differ.
    shards.iter().try_fold(modified_ns(&index)?, |latest, shard| Ok(latest.max(modified_ns(&path.join(shard))?)))
}

/// Returns whether nobody has written to the file since the save. The time may be older than the recorded one: disks
/// store it with less precision than memory, and a power cut may bring back an earlier one.
fn is_as_written(stat: &Stat, written_ns: Option<i64>) -> bool {
    written_ns.is_none_or(|written_ns| stat.modified_ns <= written_ns.into())
}

/// Returns whether a file's content matches the manifest's record under `name`.
pub(super) fn is_as_listed(path: &Path, name: &str, entry: &ManifestEntry) -> Result<bool, Errno> {
    let index = if entry.is_folder() { path.join(SHARDS_LIST) } else { path.to_path_buf() };
    let file = match fs::open(&index, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY, 0) {
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NXIO) => return Ok(false),
        file => file?,
    };
    let stat = fs::stat_of(file.as_fd())?;
    if stat.kind != FileKind::File {
        return Ok(false);
    }
    match entry.parts.iter().find(|part| part.file == name) {
        Some(part) => is_part(&file, &stat, part),
        None if entry.is_folder() => Ok(stat.bytes == entry.index_nbytes && has_index(&file, entry)?),
        None if entry.parts.is_empty() => Ok(stat.bytes == entry.nbytes && has_index(&file, entry)?),
        None => lists(&file, &index, &entry.parts),
    }
}

/// Renames without replacing. File systems without such a call get a hard link, or else a check before the rename: only
/// then a file that appears in between is replaced.
fn rename_new(from: &Path, to: &Path) -> Result<(), Errno> {
    match fs::rename_new(from, to) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {}
        renamed => return renamed,
    }
    let stat = fs::stat_link(from)?;
    if stat.kind == FileKind::File {
        let file = fs::open(from, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK, 0)?;
        match fs::link(file.as_fd(), to) {
            Ok(()) => return fs::unlink(from),
            // A crash between the two calls leaves both names.
            Err(Errno::EXIST) if fs::stat_link(to).is_ok_and(|other| other.identity == stat.identity) => {
                return fs::unlink(from);
            }
            Err(Errno::EXIST) => return Err(Errno::EXIST),
            Err(_) => {}
        }
    }
    match fs::stat_link(to) {
        Ok(_) => Err(Errno::EXIST),
        Err(Errno::NOENT) => fs::rename(from, to),
        Err(errno) => Err(errno),
    }
}

/// Removes a retired checkpoint's files from this folder, each only if it matches the manifest's record. Nobody may
/// have written to a file of tensors since the save.
#[must_use]
pub(super) fn remove(folder: &Path, entry: &ManifestEntry) -> Removal {
    let mut removal = Removal::default();
    let privately = |name: &str| std::iter::once(name.to_owned()).chain(entry.pending.get(name).cloned());
    if entry.is_folder() {
        for name in privately(&entry.file) {
            removal.remove_folder(folder, &name, entry);
        }
        return removal;
    }
    for part in &entry.parts {
        for name in privately(&part.file) {
            removal.remove_file(folder, &name, |file, stat| {
                Ok(is_as_written(stat, part.written_ns) && is_part(file, stat, part)?)
            });
        }
    }
    for name in privately(&entry.file) {
        removal.remove_file(folder, &name, |file, stat| match entry.parts.as_slice() {
            [] => Ok(is_as_written(stat, entry.written_ns) && stat.bytes == entry.nbytes && has_index(file, entry)?),
            parts => lists(file, &folder.join(&name), parts),
        });
    }
    removal
}

impl Removal {
    fn remove_file(&mut self, folder: &Path, name: &str, is_ours: impl FnOnce(&OwnedFd, &Stat) -> Result<bool, Errno>) {
        let path = folder.join(name);
        let removed = (|| {
            let file = match fs::open(&path, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY, 0) {
                Ok(file) => file,
                Err(Errno::NOENT | Errno::NOTDIR) => return Ok(true),
                Err(Errno::LOOP | Errno::NXIO) => return Ok(false),
                Err(errno) => return Err(errno),
            };
            let stat = fs::stat_of(file.as_fd())?;
            if stat.kind != FileKind::File || !is_ours(&file, &stat)? {
                return Ok(false);
            }
            match fs::stat_link(&path) {
                Ok(named) if (named.identity, named.modified_ns) != (stat.identity, stat.modified_ns) => {
                    return Ok(false);
                }
                Ok(_) => fs::unlink(&path)?,
                Err(Errno::NOENT) => {}
                Err(errno) => return Err(errno),
            }
            self.held.push(file);
            Ok(true)
        })();
        self.record(name, removed);
    }

    /// Removes the files that the folder's index lists, then the index, then the folder if it is empty.
    fn remove_folder(&mut self, parent: &Path, name: &str, entry: &ManifestEntry) {
        let folder = parent.join(name);
        match fs::stat_link(&folder) {
            Ok(stat) if stat.kind == FileKind::Folder => {}
            Ok(_) => return self.foreign.push(name.to_owned()),
            Err(Errno::NOENT | Errno::NOTDIR) => return,
            Err(errno) => return self.record(name, Err(errno)),
        }
        let mut listed = None;
        let index = folder.join(SHARDS_LIST);
        let found = (|| {
            let file = match fs::open(&index, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK, 0) {
                Ok(file) => file,
                // Removed by an earlier attempt that stopped before it removed the folder.
                Err(Errno::NOENT) => return Ok(true),
                Err(Errno::LOOP) => return Ok(false),
                Err(errno) => return Err(errno),
            };
            let stat = fs::stat_of(file.as_fd())?;
            if stat.kind != FileKind::File || stat.bytes != entry.index_nbytes || !has_index(&file, entry)? {
                return Ok(false);
            }
            listed = small_text(&file, &index)?.and_then(|text| fingerprints_of(&text));
            Ok(listed.is_some())
        })();
        match found {
            Ok(true) => {}
            other => return self.record(name, other),
        }
        if let Some(files) = listed {
            for (file, fingerprint) in files {
                self.remove_file(&folder, &file, |file, stat| {
                    Ok(is_as_written(stat, entry.written_ns) && is_shard(file, stat, fingerprint)?)
                });
            }
            if !self.failures.is_empty() {
                return;
            }
            self.remove_file(&folder, SHARDS_LIST, |file, stat| {
                Ok(stat.bytes == entry.index_nbytes && has_index(file, entry)?)
            });
        }
        match fs::remove_folder(&folder) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::NOTEMPTY | Errno::EXIST) => self.foreign.push(name.to_owned()),
            Err(errno) => self.record(name, Err(errno)),
        }
    }

    fn record(&mut self, name: &str, removed: Result<bool, Errno>) {
        match removed {
            Ok(true) => {}
            Ok(false) => self.foreign.push(name.to_owned()),
            Err(errno) => self.failures.push(format!("{name}: {errno}")),
        }
    }
}

fn has_index(file: &OwnedFd, entry: &ManifestEntry) -> Result<bool, Errno> {
    let found = crc64(file, entry.index_offset, entry.index_nbytes)?;
    Ok(found.is_some_and(|crc64| format!("{crc64:016x}") == entry.index_crc64))
}

fn is_part(file: &OwnedFd, stat: &Stat, part: &Part) -> Result<bool, Errno> {
    if stat.bytes != part.nbytes {
        return Ok(false);
    }
    let Some(expected) = &part.head_crc64 else { return Ok(true) };
    let found = crc64(file, 0, part.nbytes.min(HEAD_BYTES))?;
    Ok(found.is_some_and(|crc64| &format!("{crc64:016x}") == expected))
}

/// Returns the shards in an index, with their recorded fingerprints. `None` if a fingerprint is missing.
fn fingerprints_of(text: &[u8]) -> Option<Vec<(String, FileFingerprint)>> {
    let fingerprints: HashMap<String, FileFingerprint> = file_list::files(text).ok()?.into_iter().collect();
    members::shards(text)?.into_iter().map(|name| fingerprints.get(&name).map(|found| (name, *found))).collect()
}

/// Returns whether the file has that size and a header with that checksum.
fn is_shard(file: &OwnedFd, stat: &Stat, fingerprint: FileFingerprint) -> Result<bool, Errno> {
    let mut length = [0; LENGTH_BYTES as usize];
    if stat.bytes != fingerprint.bytes || fs::read_full_at(file.as_fd(), &mut length, 0)? < length.len() {
        return Ok(false);
    }
    let header_bytes = u64::from_le_bytes(length);
    let found = if header_bytes > HEADER_BYTES_MAX { None } else { crc64(file, 0, LENGTH_BYTES + header_bytes)? };
    Ok(found == Some(fingerprint.index_crc64))
}

fn lists(file: &OwnedFd, path: &Path, parts: &[Part]) -> Result<bool, Errno> {
    let listed = small_text(file, path)?.and_then(|text| members::parts(&text));
    Ok(listed.is_some_and(|listed| listed.iter().eq(parts.iter().map(|part| &part.file))))
}

/// Returns the text of a list of files, or `None` if the file cannot be one. A failure of the disk is an error: the
/// text is unknown then.
fn small_text(file: &OwnedFd, path: &Path) -> Result<Option<Vec<u8>>, Errno> {
    match fs::read_small_of(file, path, LIST_BYTES_MAX) {
        Ok(text) => Ok(Some(text)),
        Err(error) => error.errno().map_or(Ok(None), |errno| Err(Errno::from_raw_os_error(errno))),
    }
}
