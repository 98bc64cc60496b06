//! Helpers of the GPU tests for engines and files.
#![allow(dead_code, reason = "every test binary uses its own part")]

use std::path::Path;
use std::sync::Arc;

use deepnvme_io::{Access, Config, DirectMode, Engine, OpenOptions, TensorFile, WriteOptions};
use deepnvme_mem::{Region, RegionMut};

use crate::fake_driver::Gpu;

/// Returns the GPUs, a folder, an engine, and the empty file `file` in the folder. They are dropped in reverse order.
pub(crate) fn set_up(config: Config) -> (Gpu, tempfile::TempDir, Engine, Arc<TensorFile>) {
    let (gpu, folder) = (Gpu::new(), folder());
    let file = open(&folder.path().join("file"), DirectMode::Preferred);
    (gpu, folder, Engine::new(config).unwrap(), file)
}

/// Returns settings for transfers with cuFile.
pub(crate) fn config(gds: DirectMode) -> Config {
    Config { gds, workers: 2, queue_depth: 8, block_bytes: 128 << 10, ..Config::default() }
}

/// Returns a folder on a disk, since file systems in memory have no direct I/O.
pub(crate) fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

pub(crate) fn open(path: &Path, direct: DirectMode) -> Arc<TensorFile> {
    let options = OpenOptions { access: Access::ReadWrite, create: true, direct };
    TensorFile::open(path, options).unwrap()
}

pub(crate) fn write(engine: &Engine, file: &Arc<TensorFile>, offset: u64, source: Region) {
    engine.write(file, offset, source, WriteOptions::default()).unwrap().wait().1.unwrap();
}

pub(crate) fn read(engine: &Engine, file: &Arc<TensorFile>, offset: u64, target: RegionMut) {
    engine.read(file, offset, target).unwrap().wait().1.unwrap();
}

/// Reads a range of a file into host memory.
pub(crate) fn on_host(engine: &Engine, file: &Arc<TensorFile>, offset: u64, bytes: usize) -> Vec<u8> {
    let (target, read) = engine.read(file, offset, RegionMut::from_vec(vec![0; bytes])).unwrap().wait();
    read.unwrap();
    let mut seen = vec![0; bytes];
    target.unwrap().region().copy_to_slice(0, &mut seen);
    seen
}

/// Whether the folder may be on an NVMe drive, from which cuFile transfers directly. An array of disks may consist of
/// such drives.
pub(crate) fn may_be_on_nvme(folder: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let device = folder.metadata().unwrap().dev();
    let link = format!("/sys/dev/block/{}:{}", libc::major(device), libc::minor(device));
    std::fs::canonicalize(link).is_ok_and(|disk| {
        // The folder `slaves` lists the disks of an array. A single disk has an empty one.
        let is_array = std::fs::read_dir(disk.join("slaves")).is_ok_and(|mut slaves| slaves.next().is_some());
        is_array || disk.to_string_lossy().contains("nvme")
    })
}

/// Whether the reason is that GDS does not support the drive or file system.
pub(crate) fn is_unsuitable_disk_reason(reason: &str) -> bool {
    ["is not an NVMe drive", "is neither ext4 nor XFS", "data=ordered", "is unknown"]
        .iter()
        .any(|rule| reason.contains(rule))
}
