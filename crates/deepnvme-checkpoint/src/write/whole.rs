//! A whole file, written by one process: under a private name until it is whole, or into a file that nobody reads yet.

use std::path::Path;
use std::sync::Arc;

use deepnvme_file::{Replacement, Target};
use deepnvme_io::{Durability, Engine, ErrorKind, OpenOptions, TensorFile};

use super::save::{Save, Saved};
use crate::error::{Error, Result};
use crate::progress::Progress;

impl Save {
    /// Writes the whole file under a private name, and gives it its own.
    ///
    /// # Errors
    /// `Io` for what the disk refused: then nothing is left of the new file, and the old one is untouched.
    /// `Interrupted` when `progress` was stopped.
    pub fn run(self, engine: Arc<Engine>, target: &Target, progress: Arc<Progress>) -> Result<Saved> {
        let durability = self.options.durability;
        let (saved, replacement) = self.write(engine, target, progress)?;
        replacement.commit(durability == Durability::Full)?;
        Ok(saved)
    }

    /// Writes the whole file under a private name, and leaves it to the caller to give it another one.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn write(self, engine: Arc<Engine>, target: &Target, progress: Arc<Progress>) -> Result<(Saved, Replacement)> {
        let bytes = self.bytes();
        let (replacement, file) = create(&engine, target, bytes)?;
        let shown = Arc::clone(&progress);
        let share = Arc::new(self).share(engine, file, 0..bytes, 0, progress);
        let saved =
            share.and_then(|share| share.finish(&[])).map_err(|error| named(error, replacement.target(), bytes))?;
        shown.check()?;
        Ok((saved, replacement))
    }

    /// Writes the whole file into one that is there already, and that nobody reads yet: a member of a set that will be
    /// replaced at once. Its bytes are synced as far as the options say; its name is the caller's to sync.
    ///
    /// # Errors
    /// As [`run`](Self::run). The file is then incomplete.
    pub fn write_into(self, engine: Arc<Engine>, path: &Path, progress: Arc<Progress>) -> Result<Saved> {
        let bytes = self.bytes();
        let shown = Arc::clone(&progress);
        let options = OpenOptions::to_fill(engine.config().direct);
        let filled = || {
            let file = deepnvme_file::open(&Target::Path(path.to_path_buf()), options)?;
            file.set_len(bytes)?;
            Arc::new(self).share(engine, file, 0..bytes, 0, progress)?.finish(&[])
        };
        let saved = filled().map_err(|error| named(error, path, bytes))?;
        shown.check()?;
        Ok(saved)
    }
}

/// Makes a private file of that length, which replaces the target later. A full disk is an error before any write, and no
/// write extends the file.
///
/// # Errors
/// The refusal of the folder or the disk.
pub fn create(engine: &Engine, target: &Target, bytes: u64) -> Result<(Replacement, Arc<TensorFile>)> {
    let replacement = Replacement::new(target)?;
    let file = replacement.open(engine.config().direct)?;
    file.set_len(bytes).map_err(|error| error.at_path(replacement.target()))?;
    Ok((replacement, file))
}

/// An error of the temporary, as one of the file that was to be; a full disk with what was needed.
pub fn named(error: Error, target: &Path, file_bytes: u64) -> Error {
    let Error::Io(error) = error else { return error };
    let error = error.at_path(target);
    if error.kind() != ErrorKind::NoSpace {
        return error.into();
    }
    let text = format!(
        "the checkpoint needs {file_bytes} bytes, and there is not so much room; free some space or choose another \
         folder. What was there under that name before is untouched"
    );
    error.because(text).into()
}
