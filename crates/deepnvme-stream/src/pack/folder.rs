//! The new folder: filled under a private name, and renamed when it is complete.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsString;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use deepnvme_checkpoint::Result;
use deepnvme_checkpoint::read::INDEX_SUFFIX;
use deepnvme_file::replace::PrivateFolder;
use deepnvme_file::stripe_set::{MANIFEST_SUFFIX, STRIPE_BYTES_DEFAULT};
use deepnvme_file::{Replacement, StripeSet, Target};
use deepnvme_io::fs::{self, FileId, FileKind, OFlags, Permissions};
use deepnvme_io::op::Errno;
use deepnvme_io::{Error as IoError, ErrorKind, display};
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};

use super::encoding::{EncodingMode, dtype};
use super::model::Model;

/// The size limit for other files of a model.
const OTHER_BYTES_MAX: u64 = 256 << 20;
/// File extensions of weights.
const WEIGHTS: [&str; 14] = [
    "safetensors",
    "bin",
    "pt",
    "pth",
    "ckpt",
    "gguf",
    "ggml",
    "onnx",
    "onnx_data",
    "h5",
    "msgpack",
    "npz",
    "tflite",
    "ot",
];
/// The maximum depth of folders inside a model's folder.
const DEPTH_MAX: usize = 4;

/// A folder that appears complete. Dropped before its commit, it leaves nothing behind.
pub(super) struct NewFolder {
    folder: PrivateFolder,
    target: PathBuf,
    name: &'static str,
    stripes: Option<StripeSet>,
}

impl NewFolder {
    /// Refuses a target that exists, unless it is an empty folder, and a link: the new folder could not get its name.
    pub(super) fn check(target: &Path) -> Result<()> {
        if fs::stat_link(target).is_ok_and(|stat| stat.kind == FileKind::Link) {
            let text = "it is a symbolic link; name the folder that it leads to, or a new one";
            return Err(IoError::new(ErrorKind::InvalidInput, "pack", text).at_path(target).into());
        }
        let taken = match fs::entries(target) {
            Ok(entries) => (!entries.is_empty()).then_some("the folder is not empty; name a new or an empty one"),
            Err(Errno::NOENT) => None,
            Err(Errno::NOTDIR) => Some("this is not a folder; name a new one"),
            Err(errno) => return Err(IoError::os("pack", errno).at_path(target).into()),
        };
        if let Some(text) = taken {
            return Err(IoError::new(ErrorKind::InvalidInput, "pack", text).at_path(target).into());
        }
        if target.file_name().is_none() {
            return Err(IoError::new(ErrorKind::InvalidInput, "pack", "the path does not name a folder")
                .at_path(target)
                .into());
        }
        Ok(())
    }

    pub(super) fn new(target: &Path, disks: &[PathBuf], name: &'static str) -> Result<Self> {
        let parent = fs::folder_of(target);
        fs::make_folders(parent)?;
        let folder = PrivateFolder::new(target)?;
        let stripes = stripes(target, disks, name)?;
        Ok(Self { folder, target: target.to_path_buf(), name, stripes })
    }

    /// The private name of the folder.
    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The name of the weights file, or of its stripe manifest.
    fn file(&self) -> OsString {
        let mut file = OsString::from(self.name);
        if self.stripes.is_some() {
            file.push(MANIFEST_SUFFIX);
        }
        file
    }

    /// Creates the weights file, and returns it with the path that it gets in the private folder. The manifest of
    /// stripes lies in the folder; the stripes themselves have unique names on the disks, and are deleted with an
    /// uncommitted folder. `most` are the permissions that all source files grant.
    pub(super) fn weights(&mut self, most: Permissions) -> Result<(Replacement, Target)> {
        let path = self.folder.add(Path::new(&self.file()))?;
        let mut new = match &self.stripes {
            Some(set) => Replacement::listed(set, &path)?,
            None => Replacement::new(&Target::from(&path))?,
        };
        new.limit_permissions(most);
        Ok((new, Target::from(path)))
    }

    /// Commits the folder. Returns the path of the weights file or its manifest.
    pub(super) fn commit(self) -> Result<PathBuf> {
        let file = self.target.join(self.file());
        self.folder.commit()?;
        Ok(file)
    }

    /// Copies files other than weights: configurations, tokenizers, licences. Returns the number of copies, and the
    /// files left out.
    pub(super) fn copy_others(
        &mut self,
        source: &Path,
        model: &Model,
        mode: EncodingMode,
    ) -> Result<(usize, Vec<LeftOut>)> {
        copy_others(source, &mut self.folder, model, mode)
    }
}

/// The stripes on these disks, named after the folder.
fn stripes(target: &Path, disks: &[PathBuf], name: &str) -> Result<Option<StripeSet>> {
    if disks.is_empty() {
        return Ok(None);
    }
    let mut file = target.file_name().unwrap_or_default().to_os_string();
    file.push(".");
    file.push(name);
    let parts = disks.iter().map(|disk| disk.join(&file)).collect();
    Ok(Some(StripeSet::new(parts, STRIPE_BYTES_DEFAULT)?))
}

/// A file or folder that was not copied.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct LeftOut {
    /// Path relative to the model's folder.
    #[serde(serialize_with = "display::serialize")]
    pub path: PathBuf,
    /// The reason.
    pub reason: &'static str,
}

/// How an entry of a model's folder is treated.
enum FolderOutcome {
    /// Its entries are copied.
    Folder { mode: u32 },
    /// It is copied, with these permissions.
    Copy { mode: u32 },
    /// It is part of the weights that are packed.
    Packed,
    /// It is left out, for this reason.
    LeftOut(&'static str),
}

fn copy_others(
    source: &Path,
    target: &mut PrivateFolder,
    model: &Model,
    mode: EncodingMode,
) -> Result<(usize, Vec<LeftOut>)> {
    let (mut copied, mut left_out) = (0, Vec::new());
    let packed: HashSet<FileId> = model.identities()?;
    let mut folders = vec![(source.to_path_buf(), PathBuf::new(), 0)];
    while let Some((from, to, depth)) = folders.pop() {
        let refused = |errno| IoError::os("copy", errno).at_path(&from);
        let mut names = fs::entries(&from).map_err(refused)?;
        names.sort_unstable();
        for name in names {
            let (path, new) = (from.join(&name), to.join(&name));
            let outcome =
                outcome_of(&path, depth, &packed).map_err(|errno| IoError::os("copy", errno).at_path(&path))?;
            match outcome {
                FolderOutcome::Packed => {}
                FolderOutcome::LeftOut(reason) => left_out.push(LeftOut { path: new, reason }),
                FolderOutcome::Folder { mode } => {
                    // The new folder must be writable, even if the old one is not.
                    fs::make_folder(&target.add(&new)?, mode | 0o700).map_err(refused)?;
                    folders.push((path, new, depth + 1));
                }
                FolderOutcome::Copy { mode: permissions } => {
                    let is_config = depth == 0 && name == "config.json";
                    copy(&path, &target.add(&new)?, permissions, mode, is_config)?;
                    copied += 1;
                }
            }
        }
    }
    left_out.sort_by(|one, other| one.path.cmp(&other.path));
    Ok((copied, left_out))
}

fn outcome_of(path: &Path, depth: usize, packed: &HashSet<FileId>) -> Result<FolderOutcome, Errno> {
    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
    if name.starts_with(b".") {
        return Ok(FolderOutcome::LeftOut("it is hidden"));
    }
    let is_link = fs::stat_link(path)?.kind == FileKind::Link;
    // Links to files are followed: downloaded models often consist of links.
    let stat = match fs::stat(path) {
        Err(Errno::NOENT | Errno::LOOP) if is_link => return Ok(FolderOutcome::LeftOut("it is a dangling link")),
        stat => stat?,
    };
    let mode = stat.mode & 0o777;
    Ok(match stat.kind {
        FileKind::Folder if is_link => FolderOutcome::LeftOut("it is a link to a folder"),
        FileKind::Folder if depth >= DEPTH_MAX => FolderOutcome::LeftOut("it is nested too deeply"),
        FileKind::Folder => FolderOutcome::Folder { mode },
        FileKind::File if packed.contains(&stat.identity) => FolderOutcome::Packed,
        FileKind::File if name.ends_with(INDEX_SUFFIX.as_bytes()) || name.ends_with(MANIFEST_SUFFIX.as_bytes()) => {
            if depth == 0 {
                FolderOutcome::Packed
            } else {
                FolderOutcome::LeftOut("it lists other weights")
            }
        }
        FileKind::File if is_weight(path) => FolderOutcome::LeftOut("it contains other weights"),
        FileKind::File if stat.bytes > OTHER_BYTES_MAX => FolderOutcome::LeftOut("it exceeds 256 MiB"),
        FileKind::File => FolderOutcome::Copy { mode },
        _ => FolderOutcome::LeftOut("it is not a regular file"),
    })
}

fn is_weight(path: &Path) -> bool {
    path.extension().is_some_and(|suffix| WEIGHTS.iter().any(|weights| suffix.eq_ignore_ascii_case(weights)))
}

fn copy(from: &Path, to: &Path, permissions: u32, mode: EncodingMode, is_config: bool) -> Result<()> {
    let bytes = fs::read_small(from, OTHER_BYTES_MAX)?;
    let cast = match mode {
        EncodingMode::Cast(float) if is_config => retyped(&bytes, dtype(float).torch_name()),
        _ => None,
    };
    let written = fs::open(to, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL, permissions).and_then(|file| {
        fs::write_all(file.as_fd(), &cast.unwrap_or(bytes))?;
        fs::sync(file.as_fd())
    });
    Ok(written.map_err(|errno| IoError::os("copy to", errno).at_path(to))?)
}

/// Changes the dtype in a configuration; `None` if it names none. All other values keep their text: a number that is
/// parsed and written again may change in its last digit.
#[must_use]
pub fn retyped(config: &[u8], dtype: &str) -> Option<Vec<u8>> {
    let mut config: BTreeMap<String, Box<RawValue>> = serde_json::from_slice(config).ok()?;
    let mut is_said = false;
    for key in ["dtype", "torch_dtype"] {
        if let Some(said) = config.get_mut(key) {
            *said = to_raw_value(dtype).ok()?;
            is_said = true;
        }
    }
    is_said.then(|| serde_json::to_vec_pretty(&config).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Found by the fuzz target `config_json`.
    #[test]
    fn a_configuration_keeps_the_digits_of_its_numbers() {
        let config = br#"{"dtype": "float32", "eps": 48e84, "big": 123456789012345678901, "nested": {"a": 1.10}}"#;
        let written = String::from_utf8(retyped(config, "float16").unwrap()).unwrap();
        for kept in ["\"dtype\": \"float16\"", "48e84", "123456789012345678901", "{\"a\": 1.10}"] {
            assert!(written.contains(kept), "{kept}: {written}");
        }
        assert_eq!(retyped(b"{}", "float16"), None);
    }
}
