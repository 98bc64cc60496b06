//! Helpers of the cuFile tests for engines and files.

use std::path::Path;
use std::sync::Arc;

use deepnvme_io::{Access, Config, DirectMode, Engine, OpenOptions, TensorFile, WriteOptions};
use deepnvme_mem::{Region, RegionMut};

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

pub(crate) fn on_host(engine: &Engine, file: &Arc<TensorFile>, offset: u64, bytes: usize) -> Vec<u8> {
    let (target, read) = engine.read(file, offset, RegionMut::from_vec(vec![0; bytes])).unwrap().wait();
    read.unwrap();
    let mut seen = vec![0; bytes];
    target.unwrap().region().copy_to_slice(0, &mut seen);
    seen
}
