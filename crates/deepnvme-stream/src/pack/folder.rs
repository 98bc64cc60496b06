//! The new folder: made under a private name, with all that a model's folder has, and renamed when it is whole.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use deepnvme_checkpoint::Result;
use deepnvme_checkpoint::read::INDEX_SUFFIX;
use deepnvme_io::stripe::{MANIFEST_SUFFIX, STRIPE_BYTES_DEFAULT};
use deepnvme_io::{Error as IoError, ErrorKind, StripeSet, Target};

use super::Mode;
use super::recipe::dtype;

/// What the name of a folder contains that is not whole yet, between the name that it will have and a number.
const MARK: &str = ".deepnvme-pack-";
/// The file in it that is locked for as long as somebody writes.
const LOCK: &str = ".deepnvme-lock";
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
    target: PathBuf,
    private: PathBuf,
    name: &'static str,
    stripes: Option<StripeSet>,
    /// Locked until this is dropped.
    _lock: File,
}

impl NewFolder {
    /// Refuses to write where something is.
    pub(super) fn check(target: &Path, disks: &[PathBuf]) -> Result<()> {
        let is_free = match fs::read_dir(target) {
            Ok(mut entries) => entries.next().is_none(),
            Err(error) => error.kind() == io::ErrorKind::NotFound,
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
        for name in [super::PACKED_NAME, super::PLAIN_NAME] {
            if let Some(set) = stripes(target, disks, name)? {
                let manifest = set.manifest_path();
                if manifest.exists() {
                    let text =
                        "the stripes of another folder of that name are there; remove them, or choose another name";
                    return Err(IoError::new(ErrorKind::InvalidInput, "pack", text).at_path(manifest).into());
                }
            }
        }
        Ok(())
    }

    pub(super) fn new(target: &Path, disks: &[PathBuf], name: &'static str) -> Result<Self> {
        let parent = parent_of(target);
        fs::create_dir_all(parent).map_err(|error| IoError::from_io("make a folder", &error).at_path(parent))?;
        let mut prefix = OsString::from(".");
        prefix.push(target.file_name().unwrap_or_default());
        prefix.push(MARK);
        remove_stale(parent, &prefix);
        let mut private = prefix;
        private.push(std::process::id().to_string());
        let private = parent.join(private);
        let made = fs::create_dir(&private).and_then(|()| {
            let lock = File::create(private.join(LOCK))?;
            lock.lock()?;
            Ok(lock)
        });
        let lock = made.map_err(|error| IoError::from_io("make a folder", &error).at_path(&private))?;
        let stripes = stripes(target, disks, name)?;
        Ok(Self { target: target.to_path_buf(), private, name, stripes, _lock: lock })
    }

    /// Where other files go.
    pub(super) fn path(&self) -> &Path {
        &self.private
    }

    /// Where the weights go.
    pub(super) fn weights(&self) -> Target {
        self.stripes.clone().map_or_else(|| Target::Path(self.private.join(self.name)), Target::Stripes)
    }

    /// Gives the folder its name; the file of the weights in it, or their manifest.
    pub(super) fn commit(mut self) -> Result<PathBuf> {
        let mut file = OsString::from(self.name);
        if let Some(set) = &self.stripes {
            file.push(MANIFEST_SUFFIX);
            StripeSet::from_manifest(&set.manifest_path())?.write_manifest_to(&self.private.join(&file))?;
        }
        let refused = |error: io::Error| IoError::from_io("pack into", &error).at_path(&self.target);
        fs::remove_file(self.private.join(LOCK)).and_then(|()| sync(&self.private)).map_err(refused)?;
        fs::rename(&self.private, &self.target).and_then(|()| sync(parent_of(&self.target))).map_err(refused)?;
        self.stripes = None;
        Ok(self.target.join(file))
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        // After the rename there is none of that name.
        let _ = fs::remove_dir_all(&self.private);
        let Some(manifest) = self.stripes.as_ref().map(StripeSet::manifest_path) else { return };
        if let Ok(there) = StripeSet::from_manifest(&manifest) {
            there.parts().iter().for_each(|part| drop(fs::remove_file(part)));
            let _ = fs::remove_file(manifest);
        }
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

/// Folders whose writers have ended without removing them: nobody holds their locks.
fn remove_stale(parent: &Path, prefix: &std::ffi::OsStr) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        if !entry.file_name().as_encoded_bytes().starts_with(prefix.as_encoded_bytes()) {
            continue;
        }
        let lock = File::open(entry.path().join(LOCK));
        if lock.is_ok_and(|lock| lock.try_lock().is_ok()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn parent_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Copies what is no weight: configurations, tokenizers, licences; how many files.
pub(super) fn copy_others(source: &Path, target: &Path, mode: Mode) -> Result<usize> {
    if !source.is_dir() {
        return Ok(0);
    }
    let mut copied = 0;
    let mut folders = vec![(source.to_path_buf(), target.to_path_buf(), 0)];
    while let Some((from, to, depth)) = folders.pop() {
        let refused = |error: io::Error| IoError::from_io("copy", &error).at_path(&from);
        for entry in fs::read_dir(&from).map_err(refused)? {
            let entry = entry.map_err(refused)?;
            let (name, path) = (entry.file_name(), entry.path());
            if name.as_encoded_bytes().starts_with(b".") {
                continue;
            }
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if depth < DEPTH_MAX {
                    folders.push((path, to.join(name), depth + 1));
                }
            // What a link leads to is copied: downloads are folders of links.
            } else if fs::metadata(&path).is_ok_and(|facts| facts.is_file() && facts.len() <= OTHER_BYTES_MAX)
                && is_other(&path)
            {
                fs::create_dir_all(&to).map_err(refused)?;
                let new = to.join(&name);
                copy(&path, &new, mode, depth == 0 && name == "config.json")
                    .map_err(|error| IoError::from_io("copy", &error).at_path(&path))?;
                copied += 1;
            }
        }
    }
    Ok(copied)
}

fn is_other(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let is_weight =
        path.extension().is_some_and(|suffix| WEIGHTS.iter().any(|weights| suffix.eq_ignore_ascii_case(weights)));
    !is_weight && !name.ends_with(INDEX_SUFFIX) && !name.ends_with(MANIFEST_SUFFIX)
}

fn copy(from: &Path, to: &Path, mode: Mode, is_config: bool) -> io::Result<()> {
    let bytes = fs::read(from)?;
    let cast = match mode {
        Mode::Cast(float) if is_config => retyped(&bytes, dtype(float).torch_name()),
        _ => None,
    };
    fs::write(to, cast.unwrap_or(bytes))?;
    File::open(to)?.sync_all()
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
