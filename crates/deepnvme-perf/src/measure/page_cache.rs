//! Dropping a file from the page cache, or reading it into the cache.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use rustix::fs::{Advice, fadvise};

use crate::error::{Error, Result};

/// Bytes of one read when a file is read into the page cache.
const READ_BYTES: usize = 1 << 20;

/// Drops a file from the page cache. Needs no privileges.
pub(crate) fn drop_from_page_cache(path: &Path) -> Result<()> {
    let failed = |error: std::io::Error| Error::at(path, "cannot drop it from the page cache", &error);
    let file = File::open(path).map_err(failed)?;
    // Dirty pages cannot be dropped.
    file.sync_all().map_err(failed)?;
    fadvise(&file, 0, None, Advice::DontNeed).map_err(|errno| failed(errno.into()))
}

/// Reads a file through the page cache.
pub(crate) fn load_into_page_cache(path: &Path) -> Result<()> {
    let failed = |error: std::io::Error| Error::at(path, "cannot read it into the page cache", &error);
    let mut file = File::open(path).map_err(failed)?;
    let mut buffer = vec![0; READ_BYTES];
    while file.read(&mut buffer).map_err(failed)? > 0 {}
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;

    use deepnvme_io::fs::cached_pages;
    use rustix::io::{ReadWriteFlags, preadv2};

    use super::*;

    /// Returns whether the first byte is in the page cache; `None` if neither the kernel nor the file system reports it.
    fn is_cached(path: &Path) -> Option<bool> {
        let file = File::open(path).unwrap();
        let counted = cached_pages(file.as_fd(), &(0..1)).ok();
        counted.map_or_else(|| is_read_at_once(&file), |pages| Some(pages == 1))
    }

    /// Asks the same of a kernel without `cachestat`. A miss may start to read the page.
    fn is_read_at_once(file: &File) -> Option<bool> {
        let mut byte = [0];
        let mut into = [std::io::IoSliceMut::new(&mut byte)];
        match preadv2(file, &mut into, 0, ReadWriteFlags::NOWAIT) {
            Ok(count) => Some(count == 1),
            Err(errno) if errno == rustix::io::Errno::AGAIN => Some(false),
            Err(_) => None,
        }
    }

    #[test]
    fn a_file_is_dropped_and_loaded_again() {
        // On a disk: tmpfs cannot drop pages.
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, [7; 100_000]).unwrap();
        if is_cached(&path) != Some(true) {
            let why = "neither the kernel nor the file system reports which pages are cached";
            let _ = writeln!(std::io::stderr(), "skipped: a_file_is_dropped_and_loaded_again: {why}");
            return;
        }
        drop_from_page_cache(&path).unwrap();
        assert_eq!(is_cached(&path), Some(false));
        assert_eq!(is_cached(&path), Some(false), "the question itself has read the page");
        load_into_page_cache(&path).unwrap();
        assert_eq!(is_cached(&path), Some(true));
        let text = drop_from_page_cache(&folder.path().join("missing")).unwrap_err().to_string();
        assert!(text.contains("missing") && text.contains("page cache"), "{text}");
    }

    #[test]
    fn both_ways_to_ask_find_a_cached_page() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, [7; 100_000]).unwrap();
        load_into_page_cache(&path).unwrap();
        let file = File::open(&path).unwrap();
        let answers = [cached_pages(file.as_fd(), &(0..1)).ok().map(|pages| pages == 1), is_read_at_once(&file)];
        // Each may be unavailable here.
        assert!(answers.into_iter().flatten().all(|is_cached| is_cached), "{answers:?}");
    }
}
