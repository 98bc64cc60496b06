//! The file of the shared library, and copies of it.

use std::io;
use std::path::{Path, PathBuf};

/// File name of the shared library.
const FILE_NAME: &str = "libdeepnvme_fake_driver.so";

/// Returns the path of the shared library: `DEEPNVME_FAKE_DRIVER`, or cargo's location next to the running
/// executable.
///
/// Tests and benchmarks are in `deps` with it, examples and programs next to or above that folder. A copy outside of
/// `deps` comes last, since it may be outdated. If there is none, the path next to the executable is returned, so
/// that the loader's error names it.
#[must_use]
pub fn library_path() -> PathBuf {
    if let Some(path) = std::env::var_os("DEEPNVME_FAKE_DRIVER") {
        return path.into();
    }
    let folder = std::env::current_exe().ok().and_then(|exe| exe.parent().map(Path::to_path_buf)).unwrap_or_default();
    let candidates = ["deps", "", "../deps", ".."].map(|below| folder.join(below).join(FILE_NAME));
    candidates.iter().find(|path| path.is_file()).unwrap_or(&candidates[1]).clone()
}

/// Copies the shared library into a folder, for a test that needs its own state. Once loaded, the file may be
/// deleted.
///
/// # Errors
/// If the library is missing, or the copy cannot be written.
pub fn private_copy(folder: &Path) -> io::Result<PathBuf> {
    let copy = folder.join(FILE_NAME);
    std::fs::copy(library_path(), &copy)?;
    Ok(copy)
}

/// Functions that older releases of cuFile lack.
const NEW_FUNCTIONS: [&str; 7] = [
    "cuFileSetParameterBool",
    "cuFileSetStatsLevel",
    "cuFileGetStatsLevel",
    "cuFileStatsStart",
    "cuFileStatsStop",
    "cuFileStatsReset",
    "cuFileGetStatsL3",
];

/// Copies the shared library into a folder, without the functions that older releases of cuFile lack: their names in
/// the symbol table are changed, so that no look-up finds them.
///
/// # Errors
/// As [`private_copy`].
pub fn old_copy(folder: &Path) -> io::Result<PathBuf> {
    let copy = private_copy(folder)?;
    let mut bytes = std::fs::read(&copy)?;
    for name in NEW_FUNCTIONS {
        let entry = [b"\0", name.as_bytes(), b"\0"].concat();
        let places: Vec<_> = (0..bytes.len()).filter(|at| bytes[*at..].starts_with(&entry)).collect();
        places.into_iter().for_each(|at| bytes[at + 1] = b'x');
    }
    std::fs::write(&copy, bytes)?;
    Ok(copy)
}
