//! The checkpoints of a folder, for whoever only looks: no lock is taken, and no file gets its name.

use std::path::{Path, PathBuf};

use deepnvme_format::set::{self, State};
use deepnvme_io::op::Errno;
use deepnvme_io::{Error as IoError, ErrorKind, fs};

use super::files;
use super::manifest::{Entry, MANIFEST, MANIFEST_BYTES_MAX, Manifest};
use crate::error::{Error, Result};

/// What a manifest takes in memory for each byte of it.
const JSON_ROOM: usize = 24;

/// A manifest, and where its checkpoints are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The manifest.
    pub path: PathBuf,
    /// Its bytes.
    pub bytes: u64,
    /// Whether it has a checksum; manifests of earlier versions have none.
    pub is_sealed: bool,
    /// The checkpoints that count, the oldest step first, each with its path: its name, or the private name that a killed
    /// writer left.
    pub checkpoints: Vec<(Entry, PathBuf)>,
}

/// The manifest of a folder; nothing where it has none.
///
/// # Errors
/// `Manifest` for one that is damaged, `Io` for what the folder refuses.
pub fn listed(folder: &Path) -> Result<Option<Listed>> {
    let path = folder.join(MANIFEST);
    let Some((text, manifest)) = read(&path)? else { return Ok(None) };
    let at = |entry: Entry| {
        let path = place_of(folder, &entry.file, &entry);
        (entry, path)
    };
    let checkpoints = manifest.checkpoints.into_iter().map(at).collect();
    let is_sealed = set::state(&text) == State::Sound;
    Ok(Some(Listed { path, bytes: text.len() as u64, is_sealed, checkpoints }))
}

/// Where a file of a checkpoint is: under its name, or under the private one that a killed writer left. Somebody else may
/// have made a file of either name.
#[must_use]
pub fn place_of(folder: &Path, name: &str, entry: &Entry) -> PathBuf {
    let own = folder.join(name);
    let Some(private) = entry.pending.get(name).map(|private| folder.join(private)) else { return own };
    let is_there = |path: &Path| fs::stat_link(path).is_ok();
    if !is_there(&private) || (is_there(&own) && files::is_as_listed(&own, name, entry) == Ok(true)) {
        return own;
    }
    // It may have got its name in between.
    if is_there(&private) { private } else { own }
}

/// Whether what lies at a path is the file of that name that the manifest recorded.
///
/// # Errors
/// The kernel's refusal, but for a path at which there is nothing.
pub fn is_as_listed(path: &Path, name: &str, entry: &Entry) -> Result<bool> {
    let refused = |errno| IoError::os("open", errno).at_path(path);
    Ok(files::is_as_listed(path, name, entry).map_err(refused)?)
}

/// A manifest and its text.
pub(super) fn read(path: &Path) -> Result<Option<(Vec<u8>, Manifest)>> {
    let unlike = |detail: String| Error::Manifest { path: path.to_path_buf(), detail };
    let text = match fs::read_small_if_there(path, MANIFEST_BYTES_MAX) {
        Ok(Some(text)) => text,
        Ok(None) => return Ok(None),
        Err(failure) => return Err(odd(&failure).map_or_else(|| failure.into(), unlike)),
    };
    // Parsing ends the process where there is no memory, so it is asked for before.
    let mut room: Vec<u8> = Vec::new();
    if room.try_reserve_exact(text.len().saturating_mul(JSON_ROOM)).is_err() {
        return Err(IoError::os("read", Errno::NOMEM).at_path(path).into());
    }
    drop(room);
    let manifest = Manifest::parse(&text).map_err(unlike)?;
    Ok(Some((text, manifest)))
}

/// What has the name, where it is no file: a folder, a pipe, a symbolic link that leads to no file.
fn odd(failure: &IoError) -> Option<String> {
    match failure.errno().map(Errno::from_raw_os_error) {
        Some(Errno::ISDIR) => Some("it is a folder".into()),
        Some(Errno::LOOP) => Some("it is a symbolic link that leads to itself".into()),
        _ if [ErrorKind::NotFound, ErrorKind::InvalidInput].contains(&failure.kind()) => Some(failure.detail().into()),
        _ => None,
    }
}
