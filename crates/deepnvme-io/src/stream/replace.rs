//! Replacing a file, or a stripe set, at once: private files first, then one rename.
//!
//! A single file gets the name itself. The parts of a stripe set cannot all be renamed at once, so new parts keep
//! names of their own and the rename of the manifest, which lists them, is the one moment of change.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::temporary::{self, Temporary};
use crate::config::DirectMode;
use crate::error::{Error, ErrorKind, Result};
use crate::file::{OpenOptions, Target, TensorFile};
use crate::stripe::StripeSet;

/// What the names of temporaries contain, after the name of the file that they will replace.
pub const TEMPORARY_MARK: &str = ".deepnvme-tmp-";
/// What the names of a stripe set's rewritten parts contain, after the name of the part as the caller gave it.
pub const PART_MARK: &str = ".part-";

/// Private files that become the target when committed, and vanish otherwise.
#[derive(Debug)]
pub struct Replacement {
    target: PathBuf,
    files: Vec<Temporary>,
    stripes: Option<StripeSet>,
}

impl Replacement {
    /// Makes the private files, and removes stale ones of the same target. A symbolic link is followed: what it
    /// points to is replaced, not the link.
    ///
    /// # Errors
    /// The refusal of the folder, with the path; `InvalidInput` where the path has no file name.
    pub fn new(target: &Target) -> Result<Self> {
        match target {
            Target::Path(path) => Self::single(path),
            Target::Stripes(set) => Self::striped(set),
        }
    }

    fn single(path: &Path) -> Result<Self> {
        let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
        if target.is_dir() {
            return Err(Error::os("open for writing", rustix::io::Errno::ISDIR).at_path(path));
        }
        if target.file_name().is_none() {
            let detail = "the path has no file name";
            return Err(Error::new(ErrorKind::InvalidInput, "open for writing", detail).at_path(path));
        }
        let folder = temporary::folder_of(&target);
        let prefix = temporary::prefix(".", &target, TEMPORARY_MARK);
        temporary::remove_stale(folder, &prefix, |_| true);
        let file = Temporary::new(folder, &prefix).map_err(|error| error.at_path(path))?;
        Ok(Self { target, files: vec![file], stripes: None })
    }

    fn striped(set: &StripeSet) -> Result<Self> {
        let manifest = set.manifest_path();
        let mut files = Vec::with_capacity(set.parts().len());
        for part in set.parts() {
            let folder = temporary::folder_of(part);
            let prefix = temporary::prefix("", part, PART_MARK);
            temporary::remove_stale(folder, &prefix, |path| !is_listed(&manifest, path));
            files.push(Temporary::new(folder, &prefix).map_err(|error| error.at_path(part))?);
        }
        let parts = files.iter().map(|file| file.path().to_path_buf()).collect();
        let stripes = StripeSet::new(parts, set.stripe_bytes())?;
        Ok(Self { target: manifest, files, stripes: Some(stripes) })
    }

    /// What will be replaced: the file, or the manifest of the set.
    #[must_use]
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Where the bytes go until then.
    #[must_use]
    pub fn temporary(&self) -> Target {
        match &self.stripes {
            Some(set) => Target::Stripes(set.clone()),
            None => Target::Path(self.files[0].path().to_path_buf()),
        }
    }

    /// Opens them for that.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn open(&self, direct: DirectMode) -> Result<Arc<TensorFile>> {
        TensorFile::open(&self.temporary(), OpenOptions::to_fill(direct))
    }

    /// Makes the change. What must be on disk before that, the caller has synced; with `sync_folders` the names are
    /// on disk when this returns.
    ///
    /// # Errors
    /// The refusal of the rename or of the sync.
    pub fn commit(mut self, sync_folders: bool) -> Result<()> {
        for file in &self.files {
            file.take_mode_of(&self.target)?;
        }
        let Some(set) = self.stripes.take() else {
            // Held beyond the rename: to free a large file takes some file systems longer than to write one.
            let old = temporary::held(&self.target);
            let renamed = fs::rename(self.files[0].path(), &self.target);
            temporary::release(old);
            renamed.map_err(|error| Error::from_io("rename", &error).at_path(&self.target))?;
            self.files[0].keep();
            return if sync_folders { temporary::sync_folder_of(&self.target) } else { Ok(()) };
        };
        if sync_folders {
            set.parts().iter().try_for_each(|part| temporary::sync_folder_of(part))?;
        }
        let old = StripeSet::from_manifest(&self.target).ok();
        set.write_manifest_to(&self.target)?;
        self.files.iter_mut().for_each(Temporary::keep);
        if sync_folders {
            temporary::sync_folder_of(&self.target)?;
        }
        // The old parts belong to no file any more; a reader that has them open keeps them until it closes.
        for part in old.iter().flat_map(|old| old.parts()) {
            let _ = fs::remove_file(part);
        }
        Ok(())
    }
}

/// Whether the manifest lists that part now.
fn is_listed(manifest: &Path, part: &Path) -> bool {
    let absolute = std::path::absolute(part).unwrap_or_else(|_| part.to_path_buf());
    StripeSet::from_manifest(manifest).is_ok_and(|set| set.parts().contains(&absolute))
}
