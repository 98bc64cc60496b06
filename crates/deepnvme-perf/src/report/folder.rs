//! A place for data: its file system, its disk, and whether direct I/O works there.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use deepnvme_file::Temporary;
use deepnvme_io::shown;
use deepnvme_io::{Access, DirectMode, DirectState, TensorFile};
use serde::Serialize;

use super::device::Device;
use super::mounts;
use crate::tree::Tree;

/// A folder that was asked about.
#[derive(Clone, Debug, Default, Serialize, PartialEq, Eq)]
pub struct Folder {
    /// As it was given.
    #[serde(serialize_with = "shown::serialize")]
    pub path: PathBuf,
    /// Why nothing else is known.
    pub error: Option<String>,
    /// `ext4`, `xfs`, `tmpfs`, `nfs4`.
    pub file_system: String,
    /// What is mounted: a device, a server.
    pub source: String,
    /// Where it is mounted.
    #[serde(serialize_with = "shown::serialize")]
    pub mount_point: PathBuf,
    /// How.
    pub mount_options: Vec<String>,
    /// Bytes of the file system.
    pub total_bytes: u64,
    /// Bytes that this user may still write.
    pub free_bytes: u64,
    /// Whether files can be made here.
    pub is_writable: bool,
    /// Whether transfers bypass the page cache; `None` where no file could be tried.
    pub direct: Option<Direct>,
    /// What GPUDirect Storage would do here.
    pub gds: Option<Gds>,
    /// The way of its bytes to a GPU and back; `None` where there is none.
    pub gpu_path: Option<GpuPath>,
    /// The disk; `None` of file systems in memory and on the network.
    pub device: Option<Device>,
}

/// What direct I/O is like.
#[derive(Clone, Debug, Serialize, PartialEq, Eq)]
pub struct Direct {
    /// Whether there is any.
    pub works: bool,
    /// What addresses of memory must be multiples of.
    pub memory_alignment_bytes: Option<u64>,
    /// What offsets and lengths must be multiples of.
    pub offset_alignment_bytes: Option<u64>,
    /// Why there is none.
    pub reason: Option<String>,
}

/// What cuFile would do with files of a folder.
#[derive(Clone, Debug, Serialize, PartialEq, Eq)]
pub struct Gds {
    /// `direct`, `compatibility` or `none`.
    pub mode: &'static str,
    /// Why not the better one.
    pub reason: Option<String>,
}

/// The way that bytes of a folder take to a GPU and back.
#[derive(Clone, Debug, Serialize, PartialEq, Eq)]
pub struct GpuPath {
    /// `bounce`: through slots of host memory that the driver copies from and to.
    pub way: &'static str,
    /// Why not a shorter one.
    pub reason: String,
}

impl Folder {
    /// A folder of this machine.
    #[must_use]
    pub fn of_this_machine(path: &Path) -> Self {
        Self::gather(&Tree::of_this_machine(), path)
    }

    pub(crate) fn gather(tree: &Tree, path: &Path) -> Self {
        let unknown = |error: String| Self { path: path.to_path_buf(), error: Some(error), ..Self::default() };
        let real = match path.canonicalize() {
            Ok(real) => real,
            Err(error) => return unknown(format!("{}: {error}", shown::path(path))),
        };
        let metadata = match real.metadata() {
            Ok(metadata) if metadata.is_dir() => metadata,
            Ok(_) => {
                return unknown(format!("{}: it is not a folder; name the folder that it lies in", shown::path(path)));
            }
            Err(error) => return unknown(format!("{}: {error}", shown::path(path))),
        };
        let mount = mounts::of(tree, &real);
        let space = rustix::fs::statvfs(&real).ok();
        let number = format!("{}:{}", rustix::fs::major(metadata.dev()), rustix::fs::minor(metadata.dev()));
        let device = Device::of_number(tree, &number)
            .or_else(|| mount.as_ref().and_then(|mount| Device::of_number(tree, &mount.device)))
            .or_else(|| mount.as_ref().and_then(|mount| of_source(tree, &mount.source)));
        let (is_writable, direct) = try_direct(&real);
        let (file_system, source, mount_point, mount_options) = mount.map_or_else(
            || ("unknown".into(), String::new(), PathBuf::new(), Vec::new()),
            |mount| (mount.file_system, mount.source, mount.point, mount.options),
        );
        Self {
            path: path.to_path_buf(),
            error: None,
            file_system,
            source,
            mount_point,
            mount_options,
            total_bytes: space.as_ref().map_or(0, |space| space.f_blocks * space.f_frsize),
            free_bytes: space.as_ref().map_or(0, |space| space.f_bavail * space.f_frsize),
            is_writable,
            direct,
            gds: None,
            gpu_path: None,
            device,
        }
    }
}

/// File systems such as Btrfs have a number of their own; their source is the device.
fn of_source(tree: &Tree, source: &str) -> Option<Device> {
    let metadata = Path::new(source).starts_with("/dev").then(|| Path::new(source).metadata().ok()).flatten()?;
    let number = metadata.rdev();
    Device::of_number(tree, &format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number)))
}

/// Opens a private file in the folder, which is gone when it is closed.
fn try_direct(folder: &Path) -> (bool, Option<Direct>) {
    let opened = Temporary::new(&folder.join("deepnvme-report")).and_then(|private| {
        TensorFile::from_fd(private.file(), Some(folder), Access::ReadWrite, DirectMode::Preferred)
    });
    let Ok(file) = opened else { return (false, None) };
    let direct = match file.direct() {
        DirectState::Direct { memory_alignment_bytes, offset_alignment_bytes } => Direct {
            works: true,
            memory_alignment_bytes: Some(memory_alignment_bytes),
            offset_alignment_bytes: Some(offset_alignment_bytes),
            reason: None,
        },
        DirectState::Buffered { reason } => {
            Direct { works: false, memory_alignment_bytes: None, offset_alignment_bytes: None, reason: Some(reason) }
        }
    };
    (true, Some(direct))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_not_a_folder_and_a_missing_one_is_named() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("file"), "x").unwrap();
        let tree = Tree::of_this_machine();
        let of = |name: &str| Folder::gather(&tree, &folder.path().join(name)).error.unwrap_or_default();
        assert!(of("file").contains("not a folder"));
        assert!(of("missing").contains("missing"));
    }

    #[test]
    fn a_folder_in_memory_has_no_disk_and_no_direct_io() {
        let shared = Path::new("/dev/shm");
        if !shared.is_dir() {
            return;
        }
        let folder = Folder::gather(&Tree::of_this_machine(), shared);
        if folder.file_system == "tmpfs" && folder.is_writable {
            assert_eq!(folder.device, None);
            assert!(folder.direct.is_some_and(|direct| !direct.works && direct.reason.is_some()));
        }
    }
}
