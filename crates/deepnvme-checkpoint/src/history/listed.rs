//! The checkpoints of a folder for readers that only look: without a `History`, and without renaming any file.

use std::path::{Path, PathBuf};

use deepnvme_format::file_list::{self, SealState};
use deepnvme_format::{Error as FormatError, JSON_MEMORY_FACTOR};
use deepnvme_io::op::Errno;
use deepnvme_io::{Error as IoError, ErrorKind, fs};

use super::files;
use super::manifest::{MANIFEST, MANIFEST_BYTES_MAX, Manifest, ManifestEntry};
use crate::error::{Error, Result};

/// A manifest, and the paths of its checkpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Path of the manifest.
    pub path: PathBuf,
    /// Size of the manifest.
    pub bytes: u64,
    /// Whether it contains a checksum. Manifests of earlier versions do not.
    pub has_checksum: bool,
    /// The current checkpoints, in the order of their saves, each with its path: the final name, or the private name
    /// that a killed writer left.
    pub checkpoints: Vec<(ManifestEntry, PathBuf)>,
}

/// Reads the manifest of a folder. Returns `None` if there is none.
///
/// # Errors
/// `Manifest` if it is damaged, `Io` for errors of the folder.
pub fn listed(folder: &Path) -> Result<Option<Listed>> {
    let path = folder.join(MANIFEST);
    let Some((text, manifest)) = read(&path)? else { return Ok(None) };
    let at = |entry: ManifestEntry| {
        let path = find_file(folder, &entry.file, &entry);
        (entry, path)
    };
    let checkpoints = manifest.checkpoints.into_iter().map(at).collect();
    let has_checksum = file_list::seal_state(&text) == SealState::Sealed;
    Ok(Some(Listed { path, bytes: text.len() as u64, has_checksum, checkpoints }))
}

/// Finds a file of a checkpoint, under its final name or the private name that a killed writer left. Another program
/// may have taken either name.
#[must_use]
pub fn find_file(folder: &Path, name: &str, entry: &ManifestEntry) -> PathBuf {
    let with_final_name = folder.join(name);
    let Some(private) = entry.pending.get(name).map(|private| folder.join(private)) else { return with_final_name };
    // The caller that opens the file reports a failure of the disk.
    let is_there = |path: &Path| !fs::is_absent(path);
    let is_final = || is_there(&with_final_name) && files::is_as_listed(&with_final_name, name, entry) == Ok(true);
    if !is_there(&private) || is_final() {
        return with_final_name;
    }
    // The writer may have renamed the private file since the first check.
    if is_there(&private) { private } else { with_final_name }
}

/// Returns whether the file at a path is the one that the manifest recorded under that name.
///
/// # Errors
/// The error of the kernel, unless nothing exists at the path.
pub fn is_as_listed(path: &Path, name: &str, entry: &ManifestEntry) -> Result<bool> {
    let refused = |errno| IoError::os("open", errno).at_path(path);
    Ok(files::is_as_listed(path, name, entry).map_err(refused)?)
}

/// Reads a manifest and its text.
pub(super) fn read(path: &Path) -> Result<Option<(Vec<u8>, Manifest)>> {
    let unlike = |detail: String| Error::Manifest { path: path.to_path_buf(), detail };
    let text = match fs::read_small_if_there(path, MANIFEST_BYTES_MAX) {
        Ok(Some(text)) => text,
        Ok(None) => return Ok(None),
        Err(failure) => return Err(not_a_file(&failure).map_or_else(|| failure.into(), unlike)),
    };
    FormatError::check_memory("the manifest", text.len(), JSON_MEMORY_FACTOR)
        .map_err(|_| IoError::os("read", Errno::NOMEM).at_path(path))?;
    let manifest = Manifest::parse(&text).map_err(unlike)?;
    Ok(Some((text, manifest)))
}

/// Describes a manifest path that is not a file: a folder, a pipe, or a dangling link.
fn not_a_file(failure: &IoError) -> Option<String> {
    match failure.errno().map(Errno::from_raw_os_error) {
        Some(Errno::ISDIR) => Some("it is a folder".into()),
        // Otherwise a folder above it is such a link.
        Some(Errno::LOOP) if failure.path().is_some_and(|path| fs::stat_link(path).is_ok()) => {
            Some("it is a symbolic link that leads to itself".into())
        }
        _ if [ErrorKind::NotFound, ErrorKind::InvalidInput].contains(&failure.kind()) => Some(failure.detail().into()),
        _ => None,
    }
}
