//! Raw material: random bytes, memory at chosen alignments, files and folders on a real disk.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_mem::{Buffer, Region, RegionMut};
use rustix::fs::{Mode, OFlags};
use tempfile::TempDir;

use crate::rng::Rng;

/// Memory from the allocator starts on such a boundary, whatever the device asks for.
pub const PAGE_BYTES: usize = 4096;

/// The bytes that a seed stands for.
#[must_use]
pub fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Rng::new(seed).fill(&mut bytes);
    bytes
}

/// Zeroed memory that starts `skew` bytes after a page boundary.
///
/// # Panics
/// When the memory cannot be mapped.
#[must_use]
pub fn region_at(skew: usize, len: usize) -> RegionMut {
    let whole = Buffer::zeroed(skew + len).expect("memory for a test").into_region();
    if skew == 0 { whole } else { whole.split_at(skew).1 }
}

/// Memory like [`region_at`]'s that holds the bytes.
#[must_use]
pub fn region_holding(skew: usize, bytes: &[u8]) -> RegionMut {
    let region = region_at(skew, bytes.len());
    region.copy_from_slice(0, bytes);
    region
}

/// A copy of what the memory holds. No I/O may be in flight on it.
#[must_use]
pub fn bytes_of(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.copy_to_slice(0, &mut bytes);
    bytes
}

/// The first place where the two differ, as a message; `None` when they are equal.
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

/// The folder under which tests make theirs: `DEEPNVME_TEST_DIR`, else the system's folder for temporary files.
#[must_use]
pub fn base_dir() -> PathBuf {
    std::env::var_os("DEEPNVME_TEST_DIR").map_or_else(std::env::temp_dir, PathBuf::from)
}

/// A new folder that goes away with the value.
///
/// # Panics
/// When the base folder cannot be written.
#[must_use]
pub fn temp_dir() -> TempDir {
    let base = base_dir();
    tempfile::Builder::new()
        .prefix("deepnvme-test-")
        .tempdir_in(&base)
        .unwrap_or_else(|error| panic!("no test folder in {}: {error}", base.display()))
}

/// A file in a folder of its own, open for reading and writing through the page cache.
#[derive(Debug)]
pub struct TestFile {
    /// Where it is.
    pub path: PathBuf,
    /// Open for both directions, buffered.
    pub file: Arc<OwnedFd>,
    dir: TempDir,
}

impl TestFile {
    /// A file that holds the bytes.
    ///
    /// # Panics
    /// When the test folder cannot be written.
    #[must_use]
    pub fn holding(bytes: &[u8]) -> Self {
        let dir = temp_dir();
        let path = dir.path().join("data.bin");
        std::fs::write(&path, bytes).expect("a file in the test folder");
        let file = File::options().read(true).write(true).open(&path).expect("the file just written");
        Self { path, file: Arc::new(file.into()), dir }
    }

    /// What the file holds now, read without any backend.
    ///
    /// # Panics
    /// When it cannot be read.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        std::fs::read(&self.path).expect("the test file is readable")
    }

    /// The folder that the file is alone in.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }
}

/// The file opened past the page cache, or `None` where its file system cannot really do that.
///
/// Some file systems take the flag and refuse every transfer, so one is tried.
#[must_use]
pub fn open_direct(path: &Path) -> Option<Arc<OwnedFd>> {
    let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).ok()?;
    let mut probe = Buffer::zeroed(PAGE_BYTES).ok()?;
    rustix::io::pread(&file, probe.as_mut_slice(), 0).ok()?;
    Some(Arc::new(file))
}

/// Bytes of memory that the machine could still give away, as `/proc/meminfo` says.
#[must_use]
pub fn memory_available_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    proc_field_kib(&text, "MemAvailable:").unwrap_or(0) << 10
}

/// A figure of this process from `/proc/self/status` in bytes, such as `VmRSS:` or `VmHWM:`.
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
