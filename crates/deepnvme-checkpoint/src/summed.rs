//! The checksum of a stretch of a small file, or of a file's index: what tells one file from another.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use deepnvme_format::sums::Hasher;
use deepnvme_io::fs::{self, Kind, OFlags};
use deepnvme_io::op::Errno;
use deepnvme_io::{Error as IoError, ErrorKind, Result as IoResult};

const CHUNK_BYTES: usize = 1 << 20;

/// The CRC-64/NVME of a stretch of a regular file; `None` where the file ends before it does.
///
/// # Errors
/// The kernel's refusal; `InvalidInput` for what is no regular file. A pipe is not waited for.
pub fn crc64_of(path: &Path, offset: u64, bytes: u64) -> IoResult<Option<u64>> {
    let refused = |errno| IoError::os("read", errno).at_path(path);
    let file = fs::open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY, 0).map_err(refused)?;
    match fs::stat_of(file.as_fd()).map_err(refused)?.kind {
        Kind::File => crc64(&file, offset, bytes).map_err(refused),
        Kind::Folder => Err(refused(Errno::ISDIR)),
        other => {
            let detail = format!("it is {}, where a regular file is expected", other.name());
            Err(IoError::new(ErrorKind::InvalidInput, "read", detail).at_path(path))
        }
    }
}

/// The same of a file that is open.
pub(crate) fn crc64(file: &OwnedFd, offset: u64, bytes: u64) -> Result<Option<u64>, Errno> {
    let mut hasher = Hasher::of_cells();
    let mut chunk = vec![0; CHUNK_BYTES.min(bytes as usize)];
    let mut done = 0;
    while done < bytes {
        let now = (bytes - done).min(CHUNK_BYTES as u64) as usize;
        match fs::read_at(file.as_fd(), &mut chunk[..now], offset.saturating_add(done))? {
            0 => return Ok(None),
            count => {
                hasher.update(&chunk[..count]);
                done += count as u64;
            }
        }
    }
    Ok(Some(hasher.finish().crc64))
}
