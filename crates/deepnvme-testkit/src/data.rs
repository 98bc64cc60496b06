//! Test data: random bytes, memory at chosen alignments, files and folders on a real disk.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_io::op::Op;
use deepnvme_io::{Engine, TensorFile};
use deepnvme_mem::{Buffer, Region, RegionMut};
use rustix::fs::{Mode, OFlags};
use tempfile::TempDir;

use crate::rng::Rng;

/// Alignment of the memory of tests, independent of the device.
pub const PAGE_BYTES: usize = deepnvme_mem::PAGE_BYTES as usize;

/// Returns the random bytes of a seed.
#[must_use]
pub fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Rng::new(seed).fill(&mut bytes);
    bytes
}

/// Allocates zeroed memory that starts `skew` bytes after a page boundary.
///
/// # Panics
/// If the memory cannot be mapped.
#[must_use]
pub fn region_at(skew: usize, len: usize) -> RegionMut {
    let whole = Buffer::zeroed(skew + len).expect("memory for a test").into_region();
    if skew == 0 { whole } else { whole.split_at(skew).1 }
}

/// Allocates memory as [`region_at`] and fills it with the bytes.
#[must_use]
pub fn region_holding(skew: usize, bytes: &[u8]) -> RegionMut {
    let region = region_at(skew, bytes.len());
    region.copy_from_slice(0, bytes);
    region
}

/// Copies the bytes of the memory. No I/O may be in flight on it.
#[must_use]
pub fn bytes_of(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.copy_to_slice(0, &mut bytes);
    bytes
}

/// Reads a byte range of a file through the engine.
///
/// # Panics
/// If the read fails.
#[must_use]
pub fn read_back(engine: &Engine, file: &Arc<TensorFile>, offset: u64, bytes: usize) -> Vec<u8> {
    let (target, result) = engine.read(file, offset, RegionMut::from_vec(vec![0; bytes])).unwrap().wait();
    assert_eq!(result.unwrap().bytes, bytes as u64);
    bytes_of(&target.unwrap())
}

/// Copies the first bytes of an op's memory.
#[must_use]
pub fn first_bytes_of(op: &Op, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    let mut at = 0;
    for iovec in &op.iovecs {
        let len = iovec.len().min(count - at);
        if len > 0 {
            iovec.slice(0..len).copy_to_slice(0, &mut bytes[at..at + len]);
            at += len;
        }
    }
    bytes
}

/// Describes the first difference; `None` if they are equal.
#[must_use]
pub fn difference(found: &[u8], expected: &[u8]) -> Option<String> {
    if found == expected {
        return None;
    }
    if found.len() != expected.len() {
        return Some(format!("{} bytes where {} were expected", found.len(), expected.len()));
    }
    let wrong: Vec<usize> = (0..found.len()).filter(|at| found[*at] != expected[*at]).collect();
    let (first, last) = (wrong[0], wrong[wrong.len() - 1]);
    Some(format!(
        "{} of {} bytes differ, from byte {first} (found {:#04x}, expected {:#04x}) to byte {last}",
        wrong.len(),
        found.len(),
        found[first],
        expected[first]
    ))
}

/// Returns the parent folder of test folders: `DEEPNVME_TEST_DIR`, or the system's temporary folder.
#[must_use]
pub fn base_dir() -> PathBuf {
    std::env::var_os("DEEPNVME_TEST_DIR").map_or_else(std::env::temp_dir, PathBuf::from)
}

/// Creates a folder that is removed with the value.
///
/// # Panics
/// If the base folder is not writable.
#[must_use]
pub fn temp_dir() -> TempDir {
    let base = base_dir();
    tempfile::Builder::new()
        .prefix("deepnvme-test-")
        .tempdir_in(&base)
        .unwrap_or_else(|error| panic!("no test folder in {}: {error}", base.display()))
}

/// A file in its own folder, open for buffered reading and writing.
#[derive(Debug)]
pub struct TestFile {
    /// Path.
    pub path: PathBuf,
    /// Open for reading and writing, buffered.
    pub file: Arc<OwnedFd>,
    dir: TempDir,
}

impl TestFile {
    /// Creates a file with the bytes.
    ///
    /// # Panics
    /// If the test folder is not writable.
    #[must_use]
    pub fn holding(bytes: &[u8]) -> Self {
        let dir = temp_dir();
        let path = dir.path().join("data.bin");
        std::fs::write(&path, bytes).expect("a file in the test folder");
        let file = File::options().read(true).write(true).open(&path).expect("the file just written");
        Self { path, file: Arc::new(file.into()), dir }
    }

    /// Reads the file without a backend.
    ///
    /// # Panics
    /// If it cannot be read.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        std::fs::read(&self.path).expect("the test file is readable")
    }

    /// Returns the file's own folder.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }
}

/// Opens a file for direct I/O. Returns `None` if its file system does not support it.
///
/// Some file systems accept the flag and refuse every transfer, so one is tried.
#[must_use]
pub fn open_direct(path: &Path) -> Option<Arc<OwnedFd>> {
    let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).ok()?;
    let mut probe = Buffer::zeroed(PAGE_BYTES).ok()?;
    rustix::io::pread(&file, probe.as_mut_slice(), 0).ok()?;
    Some(Arc::new(file))
}

/// Returns the available memory of the machine, from `/proc/meminfo`.
#[must_use]
pub fn memory_available_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    proc_field_kib(&text, "MemAvailable:").unwrap_or(0) << 10
}

/// Returns a value of this process from `/proc/self/status` in bytes, such as `VmRSS:` or `VmHWM:`.
#[must_use]
pub fn own_memory_bytes(field: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    proc_field_kib(&text, field).map(|kib| kib << 10)
}

fn proc_field_kib(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with(field))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{bytes_of, difference, random_bytes, region_at, region_holding};

    #[test]
    fn memory_starts_where_it_was_asked_to() {
        for skew in [0, 1, 64, 511, 512] {
            let region = region_at(skew, 5000);
            assert_eq!((region.addr() % 4096, region.len()), (skew, 5000));
        }
        let bytes = random_bytes(1, 777);
        assert_eq!(bytes_of(&region_holding(3, &bytes).region()), bytes);
    }

    #[test]
    fn a_difference_names_its_place() {
        assert_eq!(difference(b"abc", b"abc"), None);
        let message = difference(b"abcd", b"aXcY").unwrap();
        assert!(message.contains("2 of 4") && message.contains("from byte 1") && message.contains("to byte 3"));
        assert!(difference(b"ab", b"abc").unwrap().contains("2 bytes where 3"));
    }
}
