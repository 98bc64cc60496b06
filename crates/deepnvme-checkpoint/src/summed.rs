//! The checksum of byte ranges of a file, such as its index. It identifies the file.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use deepnvme_format::checksums::Hasher;
use deepnvme_io::op::Errno;
use deepnvme_io::{Error as IoError, Result as IoResult, fs};

const CHUNK_BYTES: usize = 1 << 20;

/// A byte range of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedRange {
    /// Path of the file, which must be a regular file.
    pub path: PathBuf,
    /// Offset of the range.
    pub offset: u64,
    /// Size of the range.
    pub bytes: u64,
}

/// Computes the CRC-64/NVME of concatenated byte ranges. Returns `None` if a file ends before its range.
///
/// # Errors
/// The error of the kernel, or `InvalidInput` if it is not a regular file. Never waits for a pipe.
pub fn crc64_of(ranges: &[NamedRange]) -> IoResult<Option<u64>> {
    let mut hasher = Hasher::of_chunks();
    for NamedRange { path, offset, bytes } in ranges {
        let file = fs::open_regular(path)?;
        let is_whole = feed(&mut hasher, &file, *offset, *bytes);
        if !is_whole.map_err(|errno| IoError::os("read", errno).at_path(path))? {
            return Ok(None);
        }
    }
    Ok(Some(hasher.finish().crc64))
}

/// Like [`crc64_of`], for one byte range of an open file.
pub(crate) fn crc64(file: &OwnedFd, offset: u64, bytes: u64) -> Result<Option<u64>, Errno> {
    let mut hasher = Hasher::of_chunks();
    let is_whole = feed(&mut hasher, file, offset, bytes)?;
    Ok(is_whole.then(|| hasher.finish().crc64))
}

/// Hashes a byte range. Returns whether the file contains all of it.
fn feed(hasher: &mut Hasher, file: &OwnedFd, offset: u64, bytes: u64) -> Result<bool, Errno> {
    let mut chunk = vec![0; CHUNK_BYTES.min(bytes as usize)];
    let mut done = 0;
    while done < bytes {
        let now = (bytes - done).min(CHUNK_BYTES as u64) as usize;
        match fs::read_at(file.as_fd(), &mut chunk[..now], offset.saturating_add(done))? {
            0 => return Ok(false),
            count => {
                hasher.update(&chunk[..count]);
                done += count as u64;
            }
        }
    }
    Ok(true)
}
