//! An open file (or stripe set) with a direct and a buffered descriptor for each part.
//!
//! `open` finds a file by name, `adopt` takes over a descriptor, `part` holds the two descriptors of one
//! part, `alignment` asks the kernel what direct I/O needs.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::backend::cachestat::cached_pages;
use crate::config::DirectMode;
use crate::error::{Error, ErrorKind, Result};
use crate::fs::{self, Kind, OFlags, Stat};
use crate::split::{Channel, Geometry};
use crate::stripe::{Layout, StripeSet};

mod alignment;
mod part;

pub(crate) use part::Part;

/// Times that a stripe set may be replaced while it is being opened.
const REPLACEMENTS_MAX: usize = 100;
/// Smallest write in place that is worth asking for the file's size first.
const ROOM_BYTES_MIN: u64 = 4 << 20;

/// What a file is opened for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Access {
    /// Reads only.
    Read,
    /// Writes only.
    Write,
    /// Both.
    ReadWrite,
}

impl Access {
    fn flags(self) -> OFlags {
        match self {
            Self::Read => OFlags::RDONLY,
            Self::Write => OFlags::WRONLY,
            Self::ReadWrite => OFlags::RDWR,
        }
    }
}

/// How to open a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpenOptions {
    /// What for.
    pub access: Access,
    /// Make the file where it is missing (mode 0666, less the umask).
    pub create: bool,
    /// Whether to bypass the page cache.
    pub direct: DirectMode,
}

impl OpenOptions {
    /// For a file that is there, and is to be written whole. Its end is ragged, and goes through the page cache also where
    /// direct I/O is `Required`.
    #[must_use]
    pub fn to_fill(direct: DirectMode) -> Self {
        let direct = match direct {
            DirectMode::Required | DirectMode::Preferred => DirectMode::Preferred,
            DirectMode::Disabled => DirectMode::Disabled,
        };
        Self { access: Access::ReadWrite, create: false, direct }
    }
}

/// What a path argument names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Target {
    /// One file.
    Path(PathBuf),
    /// One logical file over several.
    Stripes(StripeSet),
}

impl Target {
    /// The path that errors name: the file, or the manifest of the set.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        match self {
            Self::Path(path) => path.clone(),
            Self::Stripes(set) => set.manifest_path(),
        }
    }

    /// The same, whatever folder the process changes to: for whoever opens it later.
    #[must_use]
    pub fn absolute(&self) -> Self {
        match self {
            Self::Path(path) => Self::Path(std::path::absolute(path).unwrap_or_else(|_| path.clone())),
            Self::Stripes(set) => Self::Stripes(set.absolute()),
        }
    }
}

impl<P: Into<PathBuf>> From<P> for Target {
    fn from(path: P) -> Self {
        Self::Path(path.into())
    }
}

/// Whether a file's transfers bypass the page cache, and if not, why.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DirectState {
    /// They do.
    Direct {
        /// What every memory address must be a multiple of, to go without a copy.
        memory_alignment_bytes: u64,
        /// What every offset and length is made a multiple of.
        offset_alignment_bytes: u64,
    },
    /// They go through the page cache.
    Buffered {
        /// Why.
        reason: String,
    },
}

/// An open file, or the parts of an open stripe set. Shared by the requests in flight on it; closed with the last.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    parts: Vec<Part>,
    layout: Layout,
}

impl TensorFile {
    /// Opens a path or a stripe set. A path that ends in `.stripes.json` and holds a manifest is a stripe set.
    ///
    /// # Errors
    /// The kernel's refusal, with the path; `Unsupported` when direct I/O is required and not to be had.
    pub fn open(target: &Target, options: OpenOptions) -> Result<Arc<Self>> {
        match target {
            Target::Path(path) if is_manifest(path) => Self::open_manifest(path, options),
            Target::Path(path) => Ok(Arc::new(Self {
                path: path.clone(),
                parts: vec![Part::open(path, options)?],
                layout: Layout::SINGLE,
            })),
            Target::Stripes(set) => Self::open_stripes(set, options),
        }
    }

    /// A set by the files that its caller named, and by its manifest where there is one.
    fn open_stripes(named: &StripeSet, options: OpenOptions) -> Result<Arc<Self>> {
        let manifest = named.manifest_path();
        Self::open_listed(&manifest, options, || match StripeSet::find(&manifest)? {
            Some(stored) if stored.parts().len() != named.parts().len() => {
                let (was, is) = (stored.parts().len(), named.parts().len());
                let detail = format!("the set was written over {was} parts, and is opened with {is}; name all of them");
                Err(Error::new(ErrorKind::InvalidInput, "open", detail).at_path(&manifest))
            }
            // The manifest knows which files hold the parts and how they were striped.
            Some(stored) => Ok((stored, true)),
            None => Ok((named.clone(), false)),
        })
    }

    /// A set by its manifest, which may lie anywhere.
    fn open_manifest(manifest: &Path, options: OpenOptions) -> Result<Arc<Self>> {
        Self::open_listed(manifest, options, || Ok((StripeSet::from_manifest(manifest)?, true)))
    }

    /// Opens the parts of the set that `list` finds, which also says whether a manifest lists them. When one of those is
    /// gone, the set may have been replaced since the manifest was read: then it is read again.
    fn open_listed(
        manifest: &Path,
        options: OpenOptions,
        list: impl Fn() -> Result<(StripeSet, bool)>,
    ) -> Result<Arc<Self>> {
        let mut before = None;
        for _ in 0..REPLACEMENTS_MAX {
            let (set, is_listed) = list()?;
            let options = OpenOptions { create: options.create && !is_listed, ..options };
            let parts: Result<Vec<_>> = set.parts().iter().map(|path| Part::open(path, options)).collect();
            match parts {
                Err(error) if is_listed && error.kind() == ErrorKind::NotFound && before.as_ref() != Some(&set) => {
                    before = Some(set);
                }
                Err(error) => return Err(error),
                Ok(parts) => {
                    if options.create {
                        set.write_manifest()?;
                    }
                    let layout = match parts.len() {
                        1 => Layout::SINGLE,
                        count => Layout { parts: count as u64, stripe_bytes: set.stripe_bytes() },
                    };
                    return Ok(Arc::new(Self { path: manifest.to_path_buf(), parts, layout }));
                }
            }
        }
        let detail = "the set was replaced again and again while it was being opened; open it again";
        Err(Error::new(ErrorKind::Busy, "open", detail).at_path(manifest))
    }

    /// Takes a duplicate of an open descriptor; the caller's own stays as it is, and stays the caller's to close.
    ///
    /// # Errors
    /// `InvalidInput` when it is no regular file or block device, or not open for `access`.
    pub fn from_fd(fd: BorrowedFd<'_>, path: Option<&Path>, access: Access, direct: DirectMode) -> Result<Arc<Self>> {
        let part = Part::adopt(fd, path, access, direct)?;
        Ok(Arc::new(Self { path: part.path().to_path_buf(), parts: vec![part], layout: Layout::SINGLE }))
    }

    /// As [`from_fd`](Self::from_fd), for the parts of a stripe set, which no manifest names. One part is a plain file.
    ///
    /// # Errors
    /// As [`from_fd`](Self::from_fd); `InvalidInput` for no parts, and where [`StripeSet::new`] finds fault.
    pub fn from_fds(
        parts: &[(BorrowedFd<'_>, &Path)],
        stripe_bytes: u64,
        access: Access,
        direct: DirectMode,
    ) -> Result<Arc<Self>> {
        let set = StripeSet::new(parts.iter().map(|(_, path)| path.to_path_buf()).collect(), stripe_bytes)?;
        let adopt = |(fd, path): &(BorrowedFd<'_>, &Path)| Part::adopt(*fd, Some(path), access, direct);
        let opened = parts.iter().map(adopt).collect::<Result<Vec<_>>>()?;
        let layout = match parts.len() {
            1 => Layout::SINGLE,
            count => Layout { parts: count as u64, stripe_bytes },
        };
        Ok(Arc::new(Self { path: set.parts()[0].clone(), parts: opened, layout }))
    }

    /// The path that errors name.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the byte at `offset` is: the part's descriptor through the page cache and its path, the offset there, and how many
    /// bytes from it on lie side by side.
    ///
    /// # Errors
    /// Where that descriptor has yet to be opened, and cannot be.
    pub fn locate(&self, offset: u64) -> Result<(Arc<OwnedFd>, &Path, u64, u64)> {
        let (part, at) = self.part_at(offset);
        let together = match self.layout {
            Layout::SINGLE => u64::MAX - offset,
            Layout { stripe_bytes, .. } => stripe_bytes - offset % stripe_bytes,
        };
        Ok((part.descriptor(Channel::Buffered)?, part.path(), at, together))
    }

    /// Whether transfers bypass the page cache; of a stripe set, the first part that does not decides.
    #[must_use]
    pub fn direct(&self) -> DirectState {
        let states = self.parts.iter().map(Part::direct_state);
        let mut last = None;
        for state in states {
            if matches!(state, DirectState::Buffered { .. }) {
                return state;
            }
            last = Some(state);
        }
        last.unwrap_or(DirectState::Buffered { reason: "the set has no parts".into() })
    }

    /// Bytes in the file now.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn len(&self) -> Result<u64> {
        let mut bytes = 0;
        for (index, part) in self.parts.iter().enumerate() {
            bytes = bytes.max(self.layout.logical_end(index, part.len()?));
        }
        Ok(bytes)
    }

    /// What the kernel knows of the file, or of each part of a stripe set.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn stats(&self) -> Result<Vec<Stat>> {
        self.parts.iter().map(Part::stat).collect()
    }

    /// The permission bits that the file has, or that all parts of a stripe set have.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn permissions(&self) -> Result<u32> {
        Ok(self.stats()?.iter().fold(0o777, |common, stat| common & stat.mode))
    }

    /// Whether the file has no bytes now.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn is_empty(&self) -> Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Makes the file that long: cuts what is beyond, allocates what is missing where the file system can.
    ///
    /// # Errors
    /// `NoSpace`, saying how much was needed and how much is free, or another refusal.
    pub fn set_len(&self, bytes: u64) -> Result<()> {
        for (index, part) in self.parts.iter().enumerate() {
            part.set_len(self.layout.part_bytes(bytes, index))?;
        }
        Ok(())
    }

    /// Before a write of `written_bytes` that ends at `end`. A plain file is allocated that far if much is written:
    /// file systems run writes inside a file side by side, and extending ones one by one. Of a stripe set, every part
    /// becomes as long as its share, so that the gap before a write beyond the end is there to be read; a plain file
    /// does that by itself.
    pub(crate) fn make_room(&self, end: u64, written_bytes: u64) -> Result<()> {
        if let [part] = &self.parts[..] {
            return if written_bytes >= ROOM_BYTES_MIN { part.grow(end, written_bytes) } else { Ok(()) };
        }
        for (index, part) in self.parts.iter().enumerate() {
            part.reach(self.layout.part_bytes(end, index))?;
        }
        Ok(())
    }

    /// Whether a write of that size wants [`make_room`](Self::make_room) first.
    pub(crate) fn wants_room(&self, written_bytes: u64) -> bool {
        self.parts.len() > 1 || written_bytes >= ROOM_BYTES_MIN
    }

    /// Cuts what is beyond `bytes`; allocates nothing.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn cut(&self, bytes: u64) -> Result<()> {
        for (index, part) in self.parts.iter().enumerate() {
            part.cut(self.layout.part_bytes(bytes, index))?;
        }
        Ok(())
    }

    /// How much of that range of a plain file is in the page cache, and how much that is of, in pages. `None` of a
    /// stripe set, and where the kernel does not tell.
    pub(crate) fn cached_pages(&self, range: &Range<u64>) -> Option<(u64, u64)> {
        let [part] = &self.parts[..] else { return None };
        if range.is_empty() {
            return None;
        }
        let page_bytes = rustix::param::page_size() as u64;
        let pages = (range.end - 1) / page_bytes - range.start / page_bytes + 1;
        Some((cached_pages(part.any().as_fd(), range)?, pages))
    }

    /// The same open file, with every transfer through the page cache, for that reason.
    pub(crate) fn buffered_twin(&self, reason: &str) -> Result<Arc<Self>> {
        let parts = self.parts.iter().map(|part| part.buffered_twin(reason)).collect::<Result<Vec<_>>>()?;
        Ok(Arc::new(Self { path: self.path.clone(), parts, layout: self.layout }))
    }

    /// A descriptor of the first part, for those who lock or stat it.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.parts[0].any().as_fd()
    }

    pub(crate) fn geometry(&self) -> Geometry {
        let mut direct = self.parts[0].alignment();
        for part in &self.parts[1..] {
            direct = match (direct, part.alignment()) {
                (Some(a), Some(b)) => {
                    Some(crate::split::FileAlignment { memory: a.memory.max(b.memory), offset: a.offset.max(b.offset) })
                }
                _ => None,
            };
        }
        Geometry { direct, layout: self.layout, has_gds: false }
    }

    pub(crate) fn part_at(&self, offset: u64) -> (&Part, u64) {
        let (part, at) = self.layout.locate(offset);
        (&self.parts[part], at)
    }

    pub(crate) fn parts(&self) -> &[Part] {
        &self.parts
    }
}

fn is_manifest(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().ends_with(crate::stripe::MANIFEST_SUFFIX.as_bytes())
        && fs::stat(path).is_ok_and(|stat| stat.kind == Kind::File)
}
