//! The new folder: made under a private name, with all that a model's folder has, and renamed when it is whole.

use std::collections::HashSet;
use std::ffi::OsString;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use deepnvme_checkpoint::Result;
use deepnvme_checkpoint::read::INDEX_SUFFIX;
use deepnvme_io::fs::{self, Kind, OFlags};
use deepnvme_io::op::Errno;
use deepnvme_io::stream::{PrivateFolder, Replacement};
use deepnvme_io::stripe::{MANIFEST_SUFFIX, STRIPE_BYTES_DEFAULT};
use deepnvme_io::{Error as IoError, ErrorKind, StripeSet, Target};

use super::Mode;
use super::recipe::dtype;

/// Other files of a model are no larger.
const OTHER_BYTES_MAX: u64 = 256 << 20;
/// What weights of any kind end with.
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
/// How deep folders in a model's folder are looked through.
const DEPTH_MAX: usize = 4;

/// A folder that will be there at once; dropped before, it leaves nothing behind.
pub(super) struct NewFolder {
    folder: PrivateFolder,
    target: PathBuf,
    name: &'static str,
    stripes: Option<StripeSet>,
}

impl NewFolder {
    /// Refuses to write where something is.
    pub(super) fn check(target: &Path) -> Result<()> {
        let is_free = match fs::entries(target) {
            Ok(entries) => entries.is_empty(),
            Err(Errno::NOENT) => true,
            Err(Errno::NOTDIR) => false,
            Err(errno) => return Err(IoError::os("pack", errno).at_path(target).into()),
        };
        if !is_free {
            let text = "something is there already; name a folder that is not there yet";
            return Err(IoError::new(ErrorKind::InvalidInput, "pack", text).at_path(target).into());
        }
        if target.file_name().is_none() {
            return Err(IoError::new(ErrorKind::InvalidInput, "pack", "the path names no folder")
                .at_path(target)
                .into());
        }
        Ok(())
    }

    pub(super) fn new(target: &Path, disks: &[PathBuf], name: &'static str) -> Result<Self> {
        let parent = fs::folder_of(target);
        fs::make_folders(parent).map_err(|errno| IoError::os("make a folder", errno).at_path(parent))?;
        let folder = PrivateFolder::new(target)?;
        let stripes = stripes(target, disks, name)?;
        Ok(Self { folder, target: target.to_path_buf(), name, stripes })
    }

    /// The file of the weights, or the manifest of their stripes.
    fn file(&self) -> OsString {
        let mut file = OsString::from(self.name);
        if self.stripes.is_some() {
            file.push(MANIFEST_SUFFIX);
        }
        file
    }

    /// The weights, and where they will be found. The manifest of stripes lies in the folder alone: on the disks they have
    /// names that no other model has, and they go with the folder if it does not come to be.
    pub(super) fn weights(&mut self) -> Result<(Replacement, Target)> {
        let path = self.folder.add(Path::new(&self.file()))?;
        let new = match &self.stripes {
            Some(set) => Replacement::listed(set, &path)?,
            None => Replacement::new(&Target::from(&path))?,
        };
        Ok((new, Target::from(path)))
    }

    /// Gives the folder its name; the file of the weights in it, or their manifest.
    pub(super) fn commit(self) -> Result<PathBuf> {
        let file = self.target.join(self.file());
        self.folder.commit()?;
        Ok(file)
    }

    /// Copies what is no weight: configurations, tokenizers, licences; how many files.
    pub(super) fn copy_others(&mut self, source: &Path, mode: Mode) -> Result<usize> {
        copy_others(source, &mut self.folder, mode)
    }
}

/// The stripes on those disks, by the name of the folder.
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

fn copy_others(source: &Path, target: &mut PrivateFolder, mode: Mode) -> Result<usize> {
    if !fs::is_folder(source) {
        return Ok(0);
    }
    let mut copied = 0;
    let mut folders = vec![(source.to_path_buf(), PathBuf::new(), 0)];
    let mut made = HashSet::from([PathBuf::new()]);
    while let Some((from, to, depth)) = folders.pop() {
        let refused = |errno| IoError::os("copy", errno).at_path(&from);
        for name in fs::entries(&from).map_err(refused)? {
            let path = from.join(&name);
            if name.as_encoded_bytes().starts_with(b".") {
                continue;
            }
            if fs::stat_link(&path).is_ok_and(|stat| stat.kind == Kind::Folder) {
                if depth < DEPTH_MAX {
                    folders.push((path, to.join(name), depth + 1));
                }
            // What a link leads to is copied: downloads are folders of links.
            } else if fs::stat(&path).is_ok_and(|stat| stat.kind == Kind::File && stat.bytes <= OTHER_BYTES_MAX)
                && is_other(&path)
            {
                for folder in to.ancestors().collect::<Vec<_>>().into_iter().rev() {
                    if made.insert(folder.to_path_buf()) {
                        fs::make_folder(&target.add(folder)?, 0o777).map_err(refused)?;
                    }
                }
                let new = target.add(&to.join(&name))?;
                copy(&path, &new, mode, depth == 0 && name == "config.json")?;
                copied += 1;
            }
        }
    }
    Ok(copied)
}

fn is_other(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
    let is_weight =
        path.extension().is_some_and(|suffix| WEIGHTS.iter().any(|weights| suffix.eq_ignore_ascii_case(weights)));
    !is_weight && !name.ends_with(INDEX_SUFFIX.as_bytes()) && !name.ends_with(MANIFEST_SUFFIX.as_bytes())
}

fn copy(from: &Path, to: &Path, mode: Mode, is_config: bool) -> Result<()> {
    let bytes = fs::read_small(from, OTHER_BYTES_MAX)?;
    let cast = match mode {
        Mode::Cast(float) if is_config => retyped(&bytes, dtype(float).torch_name()),
        _ => None,
    };
    let written = fs::open(to, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL, 0o666).and_then(|file| {
        fs::write_all(file.as_fd(), &cast.unwrap_or(bytes))?;
        fs::sync(file.as_fd())
    });
    Ok(written.map_err(|errno| IoError::os("copy to", errno).at_path(to))?)
}

/// A configuration that says which type its weights have; `None` where it says nothing of it.
fn retyped(config: &[u8], dtype: &str) -> Option<Vec<u8>> {
    let mut config: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(config).ok()?;
    let mut is_said = false;
    for key in ["dtype", "torch_dtype"] {
        if let Some(said) = config.get_mut(key) {
            *said = dtype.into();
            is_said = true;
        }
    }
    is_said.then(|| serde_json::to_vec_pretty(&config).ok()).flatten()
}
