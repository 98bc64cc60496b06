//! A folder for data: its file system, its disk, and whether direct I/O works.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use deepnvme_file::Temporary;
use deepnvme_io::display;
use deepnvme_io::{Access, DirectMode, DirectState, TensorFile};
use serde::Serialize;

use super::device::BlockDevice;
use super::mounts::{self, Mount};
use crate::system_files::SystemFiles;

/// A folder for data.
#[derive(Clone, Debug, Default, Serialize, PartialEq, Eq)]
pub struct FolderReport {
    /// The path as given.
    #[serde(serialize_with = "display::serialize")]
    pub path: PathBuf,
    /// Why the folder could not be examined.
    pub error: Option<String>,
    /// Its mount.
    #[serde(flatten)]
    pub mount: Mount,
    /// Size of the file system in bytes.
    pub total_bytes: u64,
    /// Free bytes for this user.
    pub free_bytes: u64,
    /// Whether files can be made here.
    pub is_writable: bool,
    /// The routes between it and memory.
    #[serde(flatten)]
    pub routes: Routes,
    /// The disk; `None` for file systems in memory or on the network.
    pub device: Option<BlockDevice>,
}

/// The routes between a folder and memory.
#[derive(Clone, Debug, Default, Serialize, PartialEq, Eq)]
pub struct Routes {
    /// Support for direct I/O; `None` if no file could be made to test it.
    pub direct: Option<DirectReport>,
    /// Support for GPUDirect Storage.
    pub gds: Option<GdsReport>,
    /// The route between this folder and a GPU by default; `None` without a GPU.
    pub gpu_route: Option<DefaultGpuRoute>,
}

/// Support for direct I/O.
#[derive(Clone, Debug, Serialize, PartialEq, Eq)]
pub struct DirectReport {
    /// Whether it works.
    pub works: bool,
    /// The alignment of memory addresses.
    pub memory_alignment_bytes: Option<u64>,
    /// The alignment of offsets and lengths.
    pub offset_alignment_bytes: Option<u64>,
    /// Why it does not work.
    pub reason: Option<String>,
}

/// Support for GPUDirect Storage.
#[derive(Clone, Debug, Serialize, PartialEq, Eq)]
pub struct GdsReport {
    /// The mode of cuFile for the folder: `direct`, `compatibility` or `none`.
    pub mode: &'static str,
    /// Why not a better mode.
    pub reason: Option<String>,
    /// How cuFile has counted the reads of a trial; `None` if there was none, or without statistics.
    pub reads: Option<GdsReads>,
}

/// Reads by the way that they took, as cuFile counts them.
#[derive(Clone, Copy, Debug, Serialize, PartialEq, Eq)]
pub struct GdsReads {
    /// Directly, through the kernel module nvidia-fs.
    pub nvidia_fs: u64,
    /// Directly, through the kernel's own peer-to-peer transfers.
    pub peer_to_peer: u64,
    /// Through host memory.
    pub posix: u64,
}

/// The route between a folder and a GPU in an engine with the default settings.
#[derive(Clone, Debug, Serialize, PartialEq, Eq)]
pub struct DefaultGpuRoute {
    /// `bounce`: through bounce buffers in host memory.
    pub kind: &'static str,
    /// Why not a shorter route.
    pub reason: String,
}

impl FolderReport {
    /// Examines a folder of this machine.
    #[must_use]
    pub fn of_this_machine(path: &Path) -> Self {
        Self::gather(&SystemFiles::of_this_machine(), path)
    }

    pub(crate) fn gather(files: &SystemFiles, path: &Path) -> Self {
        let unknown = |error: String| Self { path: path.to_path_buf(), error: Some(error), ..Self::default() };
        let real = match path.canonicalize() {
            Ok(real) => real,
            Err(error) => return unknown(format!("{}: {error}", display::path(path))),
        };
        let metadata = match real.metadata() {
            Ok(metadata) if metadata.is_dir() => metadata,
            Ok(_) => {
                return unknown(format!("{}: not a folder; name the folder that contains it", display::path(path)));
            }
            Err(error) => return unknown(format!("{}: {error}", display::path(path))),
        };
        let mount = mounts::of(files, &real);
        let space = rustix::fs::statvfs(&real).ok();
        let number = format!("{}:{}", rustix::fs::major(metadata.dev()), rustix::fs::minor(metadata.dev()));
        let device = BlockDevice::of_number(files, &number)
            .or_else(|| mount.as_ref().and_then(|mount| BlockDevice::of_number(files, &mount.device)))
            .or_else(|| mount.as_ref().and_then(|mount| of_source(files, &mount.source)));
        let (is_writable, direct) = try_direct(&real);
        Self {
            path: path.to_path_buf(),
            error: None,
            mount: mount.unwrap_or_else(|| Mount { file_system: "unknown".into(), ..Mount::default() }),
            total_bytes: space.as_ref().map_or(0, |space| space.f_blocks * space.f_frsize),
            free_bytes: space.as_ref().map_or(0, |space| space.f_bavail * space.f_frsize),
            is_writable,
            // `Report::gather`, which knows the GPUs, adds the others.
            routes: Routes { direct, gds: None, gpu_route: None },
            device,
        }
    }
}

/// Finds the disk by the mount's source: file systems such as Btrfs have device numbers of their own.
fn of_source(files: &SystemFiles, source: &str) -> Option<BlockDevice> {
    let metadata = Path::new(source).starts_with("/dev").then(|| Path::new(source).metadata().ok()).flatten()?;
    let number = metadata.rdev();
    BlockDevice::of_number(files, &format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number)))
}

/// Tests direct I/O with a temporary file. Returns whether the file could be made, and the result.
fn try_direct(folder: &Path) -> (bool, Option<DirectReport>) {
    let opened = Temporary::new(&folder.join("deepnvme-report")).and_then(|private| {
        TensorFile::from_fd(private.file(), Some(folder), Access::ReadWrite, DirectMode::Preferred)
    });
    let Ok(file) = opened else { return (false, None) };
    let direct = match file.direct() {
        DirectState::Direct { memory_alignment_bytes, offset_alignment_bytes } => DirectReport {
            works: true,
            memory_alignment_bytes: Some(memory_alignment_bytes),
            offset_alignment_bytes: Some(offset_alignment_bytes),
            reason: None,
        },
        DirectState::Buffered { reason } => DirectReport {
            works: false,
            memory_alignment_bytes: None,
            offset_alignment_bytes: None,
            reason: Some(reason),
        },
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
        let files = SystemFiles::of_this_machine();
        let of = |name: &str| FolderReport::gather(&files, &folder.path().join(name)).error.unwrap_or_default();
        assert!(of("file").contains("not a folder"));
        assert!(of("missing").contains("missing"));
    }

    #[test]
    fn a_folder_in_memory_has_no_disk_and_no_direct_io() {
        let shared = Path::new("/dev/shm");
        if !shared.is_dir() {
            return;
        }
        let folder = FolderReport::gather(&SystemFiles::of_this_machine(), shared);
        if folder.mount.file_system == "tmpfs" && folder.is_writable {
            assert_eq!(folder.device, None);
            assert!(folder.routes.direct.is_some_and(|direct| !direct.works && direct.reason.is_some()));
        }
    }
}
