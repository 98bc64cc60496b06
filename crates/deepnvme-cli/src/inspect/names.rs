//! Finds the checkpoints of a folder by their names.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use deepnvme_checkpoint::Error;
use deepnvme_checkpoint::read::INDEX_SUFFIX;
use deepnvme_file::stripe_set::MANIFEST_SUFFIX;
use deepnvme_io::ErrorKind;
use deepnvme_io::fs::{self, FileKind};

/// The endings of checkpoints' names.
const ENDINGS: [&str; 5] = ["safetensors", "pt", "pth", "bin", "ckpt"];

/// A checkpoint in a folder, by its name.
pub(super) struct NamedCheckpoint {
    /// The file, or the list of its files.
    pub(super) entry: PathBuf,
    /// The path by which it is found.
    pub(super) path: PathBuf,
}

/// Returns the files of a folder that are checkpoints by their names, lists of several files first.
pub(super) fn checkpoints_by_name(folder: &Path, names: &[OsString]) -> Vec<NamedCheckpoint> {
    let (mut lists, mut files) = (Vec::new(), Vec::new());
    for name in names {
        let (bytes, entry) = (name.as_encoded_bytes(), folder.join(name));
        if is_checkpoint(name) {
            files.push(NamedCheckpoint { path: entry.clone(), entry });
        } else if let Some(base) = bytes.strip_suffix(INDEX_SUFFIX.as_bytes()) {
            // By the name of its file, the latest save counts.
            let base = OsStr::from_bytes(base);
            lists.extend(is_checkpoint(base).then(|| NamedCheckpoint { path: folder.join(base), entry }));
        } else if let Some(base) = bytes.strip_suffix(MANIFEST_SUFFIX.as_bytes()) {
            let is_list = is_checkpoint(OsStr::from_bytes(base));
            lists.extend(is_list.then(|| NamedCheckpoint { path: entry.clone(), entry }));
        }
    }
    // Folders, pipes and sockets are no checkpoints, whatever their names.
    files.retain(|file| {
        fs::stat(&file.path).map_or_else(|_| !fs::is_absent(&file.path), |stat| stat.kind == FileKind::File)
    });
    lists.sort_by(|left, right| left.path.cmp(&right.path));
    files.sort_by(|left, right| left.path.cmp(&right.path));
    lists.append(&mut files);
    lists
}

/// The names in a folder.
///
/// # Errors
/// If it cannot be listed.
pub(super) fn names_in(folder: &Path) -> deepnvme_io::Result<Vec<OsString>> {
    fs::entries(folder).map_err(|errno| deepnvme_io::Error::os("list the folder", errno).at_path(folder))
}

/// The start of the names that a `Trainer` of transformers gives its checkpoints, which are folders.
const TRAINER_PREFIX: &str = "checkpoint-";

/// Makes the error for a folder without a model say which names were looked for.
pub(super) fn without_checkpoint(error: Error, names: &[OsString]) -> Error {
    match error {
        Error::Io(error) if error.kind() == ErrorKind::NotFound => {
            let is_of_trainer = |name: &OsString| name.as_encoded_bytes().starts_with(TRAINER_PREFIX.as_bytes());
            let remedy = match names.iter().any(is_of_trainer) {
                true => format!("name its checkpoints: {TRAINER_PREFIX}*"),
                false => "check the path".into(),
            };
            let endings = ENDINGS.map(|ending| format!(".{ending}")).join(", ");
            let detail = format!(
                "the folder has no checkpoint: no manifest, no index, and no file that ends in one of {endings}; {remedy}"
            );
            error.because(detail).into()
        }
        error => error,
    }
}

/// Returns whether a name is that of a checkpoint, and not a private one.
fn is_checkpoint(name: &OsStr) -> bool {
    let name = Path::new(name);
    let ending = name.extension().and_then(OsStr::to_str).unwrap_or_default();
    !name.as_os_str().as_encoded_bytes().starts_with(b".") && ENDINGS.contains(&ending)
}
