//! Replacing a file or a stripe set at once: private files first, then one rename.
//!
//! A single file is renamed to its target. The parts of a stripe set cannot all be renamed at once, so new parts keep
//! names of their own. Replacing the manifest, which lists them, is the moment of change ([`SetReplacement`]).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::set::{Member, SetReplacement, is_token};
use super::temporary::{self, Temporary};
use crate::open::{Target, open};
use crate::stripe_set::{RECORD_KEY, StripeSet};
use deepnvme_io::DirectMode;
use deepnvme_io::fs::{self, FileKind, Permissions};
use deepnvme_io::op::Errno;
use deepnvme_io::{Error, ErrorKind, Result};
use deepnvme_io::{OpenOptions, TensorFile};

/// The marker in the names of a stripe set's rewritten parts, after the name that the caller gave.
pub const PART_MARKER: &str = ".part-";

/// Replaces a small file with these bytes, at once and durably. Follows a link as [`Replacement::new`] does.
///
/// # Errors
/// As [`Replacement::new`], and the error of a write, a sync or the rename. The old file is then intact, unless only
/// the sync after the rename failed.
pub fn replace_small(path: &Path, bytes: &[u8]) -> Result<()> {
    let replacement = Replacement::single(path)?;
    if let New::File(file) = &replacement.new {
        file.fill(bytes).map_err(|error| error.at_path(path))?;
    }
    replacement.commit(true)
}

/// Refuses parts that are not regular files, and a manifest's name that another file has: the caller named the parts,
/// but not the manifest next to the first part.
fn check_names(set: &StripeSet) -> Result<()> {
    let refused = |path: &Path, detail: &str| {
        let detail = format!("{detail}; move it away, or name other parts");
        Err(Error::new(ErrorKind::InvalidInput, "replace", detail).at_path(path))
    };
    for part in set.parts() {
        match fs::stat(part) {
            Ok(stat) if stat.kind != FileKind::File => {
                return refused(part, "a part is a regular file, and this is not");
            }
            Ok(_) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(Error::os("stat", errno).at_path(part)),
        }
    }
    let manifest = set.manifest_path();
    match StripeSet::from_manifest(&manifest) {
        Err(error) if matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Corrupt) => {
            refused(&manifest, &format!("the name of the set's manifest is taken: {}", error.detail()))
        }
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Returns the name that the caller gave to a listed part, without the mark and token of an earlier replacement.
fn without_token(part: &Path) -> PathBuf {
    // Lists are JSON, so their names are text.
    let name = part.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    match name.rsplit_once(PART_MARKER) {
        Some((before, token)) if !before.is_empty() && is_token(token) => part.with_file_name(before),
        _ => part.to_path_buf(),
    }
}

/// Private files that replace the target when committed. Otherwise they are removed.
#[derive(Debug)]
pub struct Replacement {
    target: PathBuf,
    new: New,
    /// Widest permissions of a file that replaces none.
    most: Permissions,
}

#[derive(Debug)]
enum New {
    File(Temporary),
    /// The private files, and the set that they become.
    Stripes(StripeSet, StripeSet, Box<SetReplacement>),
}

impl Replacement {
    /// Creates the private files and removes leftovers of the same target. The kernel follows a symbolic link, under
    /// its rules. The file that it points to is replaced, not the link.
    ///
    /// # Errors
    /// The error of the folder, with the path; `InvalidInput` if the path has no file name, or is a device, a pipe or a
    /// socket; `NotFound` for a dangling link.
    pub fn new(target: &Target) -> Result<Self> {
        match target {
            Target::Path(path) => Self::single(path),
            Target::Stripes(set) => Self::striped(set),
        }
    }

    fn single(path: &Path) -> Result<Self> {
        let target = temporary::resolve(path)?;
        temporary::remove_leftovers(&target);
        let file = Temporary::new(&target).map_err(|error| error.at_path(path))?;
        Ok(Self { target, new: New::File(file), most: Permissions::EVERYBODY })
    }

    fn striped(set: &StripeSet) -> Result<Self> {
        check_names(set)?;
        Self::listed(set, &set.manifest_path())
    }

    /// Like [`new`](Self::new), for a set whose manifest may lie elsewhere than next to its first part. Does not check
    /// names: such a set shares none with any other.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn listed(set: &StripeSet, manifest: &Path) -> Result<Self> {
        let member = |part: &PathBuf| {
            let caller_named = if set.is_named_by_caller() { part.clone() } else { without_token(part) };
            let mut prefix = caller_named.into_os_string();
            prefix.push(PART_MARKER);
            Member { prefix: prefix.into(), suffix: "".into() }
        };
        let members: Vec<Member> = set.parts().iter().map(member).collect();
        let new = SetReplacement::begin(manifest, &members, &[RECORD_KEY])?;
        let private = StripeSet::new(new.members().map(Path::to_path_buf).collect(), set.stripe_bytes())?;
        let named = StripeSet::new(new.names().map(Path::to_path_buf).collect(), set.stripe_bytes())?;
        Ok(Self {
            target: new.index().to_path_buf(),
            new: New::Stripes(private, named, Box::new(new)),
            most: Permissions::EVERYBODY,
        })
    }

    /// Limits the permissions of a file that replaces none to `most`, those of another file.
    pub fn limit_permissions(&mut self, most: Permissions) {
        self.most = self.most.and(most);
    }

    /// Returns the path to replace: the file, or the manifest of the set.
    #[must_use]
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Returns the private files to write to until the commit.
    #[must_use]
    pub fn temporary(&self) -> Target {
        match &self.new {
            New::Stripes(private, ..) => Target::Stripes(private.clone()),
            New::File(file) => Target::Path(file.path().to_path_buf()),
        }
    }

    /// Opens the private files for writing.
    ///
    /// # Errors
    /// The error of the kernel.
    pub fn open(&self, direct: DirectMode) -> Result<Arc<TensorFile>> {
        open(&self.temporary(), OpenOptions::to_fill(direct))
    }

    /// Gives the private file the permissions of the target, or those that a new file there would get. Does nothing for
    /// a stripe set, whose files get theirs from the commit.
    ///
    /// # Errors
    /// The error of the kernel.
    pub fn take_mode(&self) -> Result<()> {
        match &self.new {
            New::File(file) => file.take_permissions_within(self.most, &self.target),
            // The commit sets those of the members.
            New::Stripes(..) => Ok(()),
        }
    }

    /// Leaves the private file to the caller, which has recorded its name. The files of a stripe set are removed, since
    /// nothing names them yet.
    pub fn keep(self) {
        if let New::File(file) = self.new {
            file.leave();
        }
    }

    /// Commits the change. The caller has synced the data as required. With `sync_folders`, the names are on disk when
    /// this returns. The names of a stripe set always are, since the old parts are removed.
    ///
    /// # Errors
    /// The error of the rename or the sync; `InvalidInput` if the target has become a symbolic link, or is no longer a
    /// regular file.
    pub fn commit(self, sync_folders: bool) -> Result<()> {
        let Self { target, new, most } = self;
        match new {
            New::Stripes(_, named, new) => new.commit_index(named.to_manifest(&target)?, false, most).map(drop),
            New::File(mut file) => {
                if temporary::resolve(&target)? != target {
                    let detail = "it has become a symbolic link meanwhile; save again";
                    return Err(Error::new(ErrorKind::InvalidInput, "rename", detail).at_path(target));
                }
                file.take_permissions_within(most, &target)?;
                let folder = sync_folders.then(|| fs::OpenedFolder::new(fs::folder_of(&target))).transpose()?;
                // Keep the old file open beyond the rename: some file systems take longer to free a large file than to
                // write one.
                let old = temporary::held(&target);
                let renamed = file.rename(&target);
                temporary::release(old);
                renamed.map_err(|errno| temporary::rename_error(errno, &target))?;
                folder.map_or(Ok(()), |folder| folder.sync_change(&target))
            }
        }
    }
}
