//! The write of a whole file from one process, under a private name or into a file that is not read yet.

use std::path::Path;
use std::sync::Arc;

use deepnvme_file::{Replacement, Target};
use deepnvme_io::op::Errno;
use deepnvme_io::{Durability, Engine, ErrorKind, OpenOptions, TensorFile};

use super::save::{Save, Saved};
use crate::error::{Error, Result};
use crate::progress::Progress;

impl Save {
    /// Writes the whole file under a private name, then renames it.
    ///
    /// # Errors
    /// `Io` for errors of the disk. The new file is then removed, and the old one is untouched. `Interrupted` if
    /// `progress` was stopped.
    pub fn run(self, engine: Arc<Engine>, target: &Target, progress: Arc<Progress>) -> Result<Saved> {
        let durability = self.options.durability;
        let (saved, replacement) = self.write(engine, target, progress)?;
        replacement.commit(durability == Durability::Full)?;
        Ok(saved)
    }

    /// Writes the whole file under a private name and leaves the rename to the caller.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn write(self, engine: Arc<Engine>, target: &Target, progress: Arc<Progress>) -> Result<(Saved, Replacement)> {
        let bytes = self.bytes();
        let (replacement, file) = create(&engine, target, bytes)?;
        let (base, progress_after) = (0, Arc::clone(&progress));
        let shard = Arc::new(self).start_shard(engine, file, 0..bytes, base, progress);
        let saved = shard
            .and_then(|shard| shard.finish(&[]))
            .map_err(|error| error_of_target(error, replacement.target(), bytes))?;
        progress_after.check()?;
        Ok((saved, replacement))
    }

    /// Writes the whole file into an existing file that is not read yet, such as a member of a set replacement. Syncs
    /// the data as the options require. The caller syncs the name. `target` is the name that the file gets later.
    ///
    /// # Errors
    /// As [`run`](Self::run), with the path `target`. The file is then incomplete.
    pub fn write_into(self, engine: Arc<Engine>, path: &Path, target: &Path, progress: Arc<Progress>) -> Result<Saved> {
        let bytes = self.bytes();
        let (base, progress_after) = (0, Arc::clone(&progress));
        let options = OpenOptions::to_fill(engine.config().direct);
        let filled = || {
            let file = deepnvme_file::open(&Target::Path(path.to_path_buf()), options)?;
            file.allocate_len(bytes)?;
            Arc::new(self).start_shard(engine, file, 0..bytes, base, progress)?.finish(&[])
        };
        let saved = filled().map_err(|error| error_of_target(error, target, bytes))?;
        progress_after.check()?;
        Ok(saved)
    }
}

/// Creates a private file, which replaces the target later, and preallocates this length. So a full disk fails before
/// any write, and no write extends the file, unless the file system cannot preallocate.
///
/// # Errors
/// The error of the folder or the disk.
pub fn create(engine: &Engine, target: &Target, bytes: u64) -> Result<(Replacement, Arc<TensorFile>)> {
    let replacement = Replacement::new(target)?;
    let file = replacement.open(engine.config().direct)?;
    file.allocate_len(bytes).map_err(|error| error.at_path(replacement.target()))?;
    Ok((replacement, file))
}

/// Gives an error of the private file the path of the target. If the disk is full, adds the space needed.
pub fn error_of_target(error: Error, target: &Path, file_bytes: u64) -> Error {
    let Error::Io(error) = error else { return error };
    let error = error.at_path(target);
    // EFBIG: its message already names the limit on file sizes.
    if error.kind() != ErrorKind::NoSpace || error.errno() == Some(Errno::FBIG.raw_os_error()) {
        return error.into();
    }
    let text = "the disk is full; free some space or choose another folder. A file that had this name before is \
                unchanged";
    error.because(text).needing(file_bytes).into()
}
