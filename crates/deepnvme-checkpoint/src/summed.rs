//! The checksum of a stretch of a small file, or of a file's index: what tells one file from another.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use deepnvme_format::checksums::Hasher;
use deepnvme_io::op::Errno;
use deepnvme_io::{Error as IoError, Result as IoResult, fs};

const CHUNK_BYTES: usize = 1 << 20;

/// A stretch of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// The file, which is a regular one.
    pub path: PathBuf,
    /// Where it begins.
    pub offset: u64,
    /// How long it is.
    pub bytes: u64,
}

/// The CRC-64/NVME of stretches, one after the other; `None` where a file ends before its stretch does.
///
/// # Errors
/// The kernel's refusal; `InvalidInput` for what is no regular file. A pipe is not waited for.
pub fn crc64_of(stretches: &[Stretch]) -> IoResult<Option<u64>> {
    let mut hasher = Hasher::of_chunks();
    for Stretch { path, offset, bytes } in stretches {
        let file = fs::open_regular(path)?;
        let is_whole = feed(&mut hasher, &file, *offset, *bytes);
        if !is_whole.map_err(|errno| IoError::os("read", errno).at_path(path))? {
            return Ok(None);
        }
    }
    Ok(Some(hasher.finish().crc64))
}

/// The same of a stretch of a file that is open.
pub(crate) fn crc64(file: &OwnedFd, offset: u64, bytes: u64) -> Result<Option<u64>, Errno> {
    let mut hasher = Hasher::of_chunks();
    let is_whole = feed(&mut hasher, file, offset, bytes)?;
    Ok(is_whole.then(|| hasher.finish().crc64))
}

/// Whether the file has the whole stretch.
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
