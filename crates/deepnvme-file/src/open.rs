//! Opening a path: a file or a stripe set.

use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_io::fs::{self, FileKind};
use deepnvme_io::{Access, DirectMode, Error, ErrorKind, OpenOptions, Result, TensorFile, display};

use crate::stripe_set::{MANIFEST_SUFFIX, StripeSet};

/// How often a stripe set may be replaced while it is being opened.
const REPLACEMENTS_MAX: usize = 100;

/// The file or stripe set that a path argument names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Target {
    /// One file.
    Path(PathBuf),
    /// One logical file over several files.
    Stripes(StripeSet),
}

impl Target {
    /// Returns the path for error messages: the file, or the manifest of the set.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        match self {
            Self::Path(path) => path.clone(),
            Self::Stripes(set) => set.manifest_path(),
        }
    }

    /// Returns the same target by absolute paths, which stay valid when the process changes its folder.
    #[must_use]
    pub fn absolute(&self) -> Self {
        match self {
            Self::Path(path) => Self::Path(std::path::absolute(path).unwrap_or_else(|_| path.clone())),
            Self::Stripes(set) => Self::Stripes(set.absolute()),
        }
    }

    /// Returns the files that [`open()`](crate::open()) uses now: those of a set's manifest, if it has one.
    ///
    /// # Errors
    /// If the manifest is damaged or cannot be read.
    pub fn stored(&self) -> Result<Self> {
        let stored = match self {
            Self::Path(path) if is_manifest(path) => Some(StripeSet::from_manifest(path)?),
            Self::Path(_) => None,
            Self::Stripes(set) => StripeSet::find(&set.manifest_path())?,
        };
        Ok(stored.map_or_else(|| self.clone(), Self::Stripes))
    }
}

impl<P: Into<PathBuf>> From<P> for Target {
    fn from(path: P) -> Self {
        Self::Path(path.into())
    }
}

/// Returns whether a path starts as a URL does. As a local path, `s3://bucket` would be a new folder here, and the
/// bucket would stay empty.
#[must_use]
pub fn is_url(path: &Path) -> bool {
    let name = path.as_os_str().as_encoded_bytes();
    let letters = name.iter().take_while(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(byte)).count();
    letters > 1 && name[0].is_ascii_alphabetic() && name[letters..].starts_with(b"://")
}

/// Opens a path or a stripe set. A path that ends in `.stripes.json` and refers to a file is a stripe set.
///
/// # Errors
/// As [`TensorFile::open`]. For a stripe set also the errors of its manifest, `InvalidInput` if it was written over
/// another number of parts, and `Busy` if it is replaced again and again.
pub fn open(target: &Target, options: OpenOptions) -> Result<Arc<TensorFile>> {
    match target {
        Target::Path(path) if is_manifest(path) => open_manifest(path, options),
        Target::Path(path) => TensorFile::open(path, options).map_err(|error| name_manifest(error, path)),
        Target::Stripes(set) => open_stripes(set, options),
    }
}

/// Duplicates the descriptors of a stripe set's parts, without a manifest. One part is a plain file.
///
/// # Errors
/// As [`TensorFile::from_fd`] and [`StripeSet::new`].
pub fn from_descriptors(
    parts: &[(BorrowedFd<'_>, &Path)],
    stripe_bytes: u64,
    access: Access,
    direct: DirectMode,
) -> Result<Arc<TensorFile>> {
    let set = StripeSet::new(parts.iter().map(|(_, path)| path.to_path_buf()).collect(), stripe_bytes)?;
    TensorFile::from_part_fds(&set.parts()[0], parts, set.layout(), access, direct)
}

/// Opens a set by the parts that the caller named, or by its manifest if there is one.
fn open_stripes(named: &StripeSet, options: OpenOptions) -> Result<Arc<TensorFile>> {
    let manifest = named.manifest_path();
    open_listed(&manifest, options, || match StripeSet::find(&manifest)? {
        Some(stored) if stored.parts().len() != named.parts().len() => {
            let (was, is) = (stored.parts().len(), named.parts().len());
            let detail = format!("the set was written over {was} parts, and is opened with {is}; name all of them");
            Err(Error::new(ErrorKind::InvalidInput, "open", detail).at_path(&manifest))
        }
        // The manifest states the actual files and their striping.
        Some(stored) => Ok((stored, true)),
        None => Ok((named.clone(), false)),
    })
}

/// Opens a set by its manifest, wherever it lies.
fn open_manifest(manifest: &Path, options: OpenOptions) -> Result<Arc<TensorFile>> {
    open_listed(manifest, options, || Ok((StripeSet::from_manifest(manifest)?, true)))
}

/// Opens the parts of a set. `list` returns the set, and whether a manifest lists its parts. If a listed part is
/// missing, the set may have been replaced after the manifest was read. The manifest is then read again.
fn open_listed(
    manifest: &Path,
    options: OpenOptions,
    list: impl Fn() -> Result<(StripeSet, bool)>,
) -> Result<Arc<TensorFile>> {
    let mut before = None;
    for _ in 0..REPLACEMENTS_MAX {
        let (set, is_listed) = list()?;
        let options = OpenOptions { create: options.create && !is_listed, ..options };
        match TensorFile::open_parts(manifest, set.parts(), set.layout(), options) {
            Err(error) if is_listed && error.kind() == ErrorKind::NotFound && before.as_ref() != Some(&set) => {
                before = Some(set);
            }
            Err(error) => return Err(error),
            Ok(file) => {
                if options.create {
                    set.write_manifest()?;
                }
                return Ok(file);
            }
        }
    }
    let detail = "the set was replaced again and again while it was being opened; open it again";
    Err(Error::new(ErrorKind::Busy, "open", detail).at_path(manifest))
}

/// Names the manifest of a stripe set if the missing file is the name of the set's first part.
fn name_manifest(error: Error, path: &Path) -> Error {
    let mut manifest = path.as_os_str().to_owned();
    manifest.push(MANIFEST_SUFFIX);
    if error.kind() != ErrorKind::NotFound || !is_manifest(Path::new(&manifest)) {
        return error;
    }
    let detail = format!("{} is the manifest of a stripe set; open that", display::path(Path::new(&manifest)));
    error.because(detail)
}

/// Returns whether a path is that of a manifest of a stripe set.
pub(crate) fn is_manifest(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().ends_with(MANIFEST_SUFFIX.as_bytes())
        && fs::stat(path).is_ok_and(|stat| stat.kind == FileKind::File)
}
