//! The manifest for its own process: it finishes the renames of a killed writer, and remembers the result in the
//! `History`. `listed` does neither.

use std::collections::HashSet;

use super::files;
use super::manifest::Manifest;
use super::state::{History, MissingCheckpoint};
use crate::error::Result;
use crate::sync::lock;

/// How often a reader retries while a writer keeps replacing the manifest.
const READS_MAX: u32 = 100;

impl History {
    /// Reads the manifest and renames files that a killed writer could not rename. Omits checkpoints without any file
    /// here. The holder of the lock knows the manifest already: it reads and renames nothing.
    ///
    /// # Errors
    /// `Manifest` if it is damaged, `Io` for errors of the folder.
    pub fn read(&self) -> Result<Manifest> {
        let _turn = lock(&self.turn);
        if lock(&self.lock).is_some() {
            let manifest = self.manifest();
            let found = self.present(&manifest);
            self.note_missing(&manifest, &found);
            return Ok(found);
        }
        let mut manifest = self.read_file()?;
        let mut found = manifest.clone();
        for _ in 0..READS_MAX {
            for entry in manifest.checkpoints.iter().filter(|entry| !entry.pending.is_empty()) {
                // If this process may not rename the file, it is found under its private name.
                let _ = files::place(&self.folder, entry);
            }
            let present = self.present(&manifest);
            // A writer replaces the manifest before it removes a file. If the manifest has changed, a missing file
            // means that this list is outdated, not that the checkpoint is lost.
            let now = if present == manifest { manifest.clone() } else { self.read_file()? };
            if now == manifest {
                found = present;
                break;
            }
            (manifest, found) = (now.clone(), now);
        }
        self.note_missing(&manifest, &found);
        self.adopt(manifest);
        Ok(found)
    }

    /// Returns the checkpoints that [`read`](Self::read) omitted because they have no file.
    #[must_use]
    pub fn missing(&self) -> Vec<MissingCheckpoint> {
        lock(&self.state).missing.clone()
    }

    fn note_missing(&self, listed: &Manifest, present: &Manifest) {
        let there: HashSet<&str> = present.checkpoints.iter().map(|entry| entry.file.as_str()).collect();
        let missing = listed.checkpoints.iter().filter(|entry| !there.contains(entry.file.as_str()));
        lock(&self.state).missing = missing.map(MissingCheckpoint::of).collect();
    }

    /// Returns the manifest without the checkpoints that have no file here.
    fn present(&self, manifest: &Manifest) -> Manifest {
        let mut present = manifest.clone();
        present.checkpoints.retain(|entry| files::is_there(&self.folder, entry));
        present
    }
}
