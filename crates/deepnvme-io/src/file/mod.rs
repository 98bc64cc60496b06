//! An open file or stripe set, with a direct and a buffered descriptor per part.
//!
//! [`TensorFile::open`] opens a file by name, and [`TensorFile::from_fd`] duplicates a descriptor. `part` has the two
//! descriptors of one part. `alignment` finds the alignment for direct I/O. `page_cache` tells when a read uses the
//! cache.

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_mem::Region;
use smallvec::smallvec;

use crate::backend::call;
use crate::config::DirectMode;
use crate::display;
use crate::error::{Error, ErrorKind, Result};

use crate::fs::{self, AclKind, OFlags, Permissions, Stat};
use crate::op::{Errno, Op, OpKind, Token};

use crate::split::{FileGeometry, IoMode};
use crate::stripe_layout::StripeLayout;

mod alignment;
mod page_cache;
mod part;

pub(crate) use page_cache::CachedShare;
pub(crate) use part::Part;

/// Smallest write in place that preallocates.
const PREALLOCATION_BYTES_MIN: u64 = 4 << 20;

/// The access of an open file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Access {
    /// Reads only.
    Read,
    /// Writes only.
    Write,
    /// Both.
    ReadWrite,
    /// Both, of a file that nobody else uses until it is written entirely. Gaps need not be readable before that.
    Fill,
}

impl Access {
    fn flags(self) -> OFlags {
        match self {
            Self::Read => OFlags::RDONLY,
            Self::Write => OFlags::WRONLY,
            Self::ReadWrite | Self::Fill => OFlags::RDWR,
        }
    }
}

/// How to open a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpenOptions {
    /// The access.
    pub access: Access,
    /// Create the file if it is missing (mode 0666, minus the umask).
    pub create: bool,
    /// Whether to bypass the page cache.
    pub direct: DirectMode,
}

impl OpenOptions {
    /// Returns the options for an existing file that is to be written entirely. `Required` becomes `Preferred`: the
    /// ragged end of the file goes through the page cache.
    #[must_use]
    pub fn to_fill(direct: DirectMode) -> Self {
        let direct = match direct {
            DirectMode::Required | DirectMode::Preferred => DirectMode::Preferred,
            DirectMode::Disabled => DirectMode::Disabled,
        };
        Self { access: Access::Fill, create: false, direct }
    }
}

/// Whether a file's transfers bypass the page cache, and if not, why.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DirectState {
    /// They bypass it.
    Direct {
        /// Alignment of memory addresses for transfers without a copy.
        memory_alignment_bytes: u64,
        /// Alignment of every offset and length.
        offset_alignment_bytes: u64,
    },
    /// They go through the page cache.
    Buffered {
        /// The reason.
        reason: String,
    },
}

/// An open file, or the parts of an open stripe set. Shared by its requests in flight, and closed with the last
/// reference.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    parts: Vec<Part>,
    layout: StripeLayout,
}

impl TensorFile {
    /// Opens a file.
    ///
    /// # Errors
    /// The kernel's error, with the path. `InvalidInput` if it is not a regular file or block device. `Unsupported` if
    /// direct I/O is required and not available.
    pub fn open(path: &Path, options: OpenOptions) -> Result<Arc<Self>> {
        Self::open_parts(path, &[path.to_path_buf()], StripeLayout::SINGLE, options)
    }

    /// Opens the parts of one logical file, in order. `path` names the whole file, for instance in errors.
    ///
    /// # Errors
    /// As [`open`](Self::open), with the path of the part. `InvalidInput`, with `path`, if two parts are one file.
    ///
    /// # Panics
    /// If `layout` is for another number of parts.
    pub fn open_parts(path: &Path, parts: &[PathBuf], layout: StripeLayout, options: OpenOptions) -> Result<Arc<Self>> {
        assert_eq!(layout.parts, parts.len() as u64, "the layout has another number of parts");
        let parts = parts.iter().map(|part| Part::open(part, options)).collect::<Result<Vec<_>>>()?;
        refuse_one_file(&parts, path)?;
        Ok(Arc::new(Self { path: path.to_path_buf(), parts, layout }))
    }

    /// Duplicates an open descriptor. The caller keeps and closes the original, which is unchanged. `path` is the name
    /// of the file: errors state it, and a durable write syncs its folder. Without `path`, the kernel's name of the
    /// file is used.
    ///
    /// # Errors
    /// `InvalidInput` if it is not a regular file or block device, or not open for `access`. `Unsupported` if direct
    /// I/O is required and not available. The kernel's error, with the path.
    pub fn from_fd(fd: BorrowedFd<'_>, path: Option<&Path>, access: Access, direct: DirectMode) -> Result<Arc<Self>> {
        let part = Part::adopt(fd, path, access, direct)?;
        Ok(Arc::new(Self { path: part.path().to_path_buf(), parts: vec![part], layout: StripeLayout::SINGLE }))
    }

    /// Duplicates the descriptors of one logical file's parts, each with its path, as [`from_fd`](Self::from_fd) does.
    /// `path` names the whole file, for instance in errors.
    ///
    /// # Errors
    /// As [`from_fd`](Self::from_fd), with the path of the part. `InvalidInput`, with `path`, if two parts are one
    /// file.
    ///
    /// # Panics
    /// If `layout` is for another number of parts.
    pub fn from_part_fds(
        path: &Path,
        parts: &[(BorrowedFd<'_>, &Path)],
        layout: StripeLayout,
        access: Access,
        direct: DirectMode,
    ) -> Result<Arc<Self>> {
        assert_eq!(layout.parts, parts.len() as u64, "the layout has another number of parts");
        let adopt = |(fd, path): &(BorrowedFd<'_>, &Path)| Part::adopt(*fd, Some(path), access, direct);
        let parts = parts.iter().map(adopt).collect::<Result<Vec<_>>>()?;
        refuse_one_file(&parts, path)?;
        Ok(Arc::new(Self { path: path.to_path_buf(), parts, layout }))
    }

    /// Returns the path of the file, or of the whole stripe set, by which it was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Locates the byte at `offset`. Returns the part's buffered descriptor and path, the offset there, and how many
    /// bytes from there on are contiguous.
    ///
    /// # Errors
    /// If that descriptor is not open yet, and cannot be opened.
    pub fn locate(&self, offset: u64) -> Result<(Arc<OwnedFd>, &Path, u64, u64)> {
        let (part, at) = self.part_at(offset);
        Ok((part.descriptor(IoMode::Buffered)?, part.path(), at, self.layout.contiguous_bytes(offset)))
    }

    /// Returns whether transfers bypass the page cache. For a stripe set, returns the state of the first part whose
    /// transfers do not, if any.
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

    /// Returns the current length in bytes.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn len(&self) -> Result<u64> {
        let mut bytes = 0;
        for (index, part) in self.parts.iter().enumerate() {
            bytes = bytes.max(self.layout.logical_end(index, part.len()?));
        }
        Ok(bytes)
    }

    /// Returns the first part of a stripe set that is shorter than the others imply, with the missing bytes.
    pub(crate) fn short_part(&self) -> Result<Option<(&Path, u64)>> {
        let bytes = self.len()?;
        for (index, part) in self.parts.iter().enumerate() {
            let missing = self.layout.part_bytes(bytes, index).saturating_sub(part.len()?);
            if missing > 0 {
                return Ok(Some((part.path(), missing)));
            }
        }
        Ok(None)
    }

    /// Returns the path of the file, or of each part of a stripe set.
    pub fn part_paths(&self) -> impl Iterator<Item = &Path> {
        self.parts.iter().map(Part::path)
    }

    /// Returns the metadata of the file, or of each part of a stripe set.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn stats(&self) -> Result<Vec<Stat>> {
        self.parts.iter().map(Part::stat).collect()
    }

    /// Returns the permissions of the file, or those that all parts of a stripe set grant.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn permissions(&self) -> Result<Permissions> {
        let all = Permissions { mode: 0o777, group: None };
        self.parts.iter().try_fold(all, |common, part| {
            let list = fs::access_list(part.path(), AclKind::Access);
            Ok(common.and(Permissions::of(&part.stat()?, list.as_deref())))
        })
    }

    /// Returns whether the file is empty now.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn is_empty(&self) -> Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Sets the length: truncates a longer file, and allocates the missing bytes of a shorter one. If the file system
    /// cannot allocate, a shorter file keeps its length until it is written. A block device stays as it is.
    ///
    /// # Errors
    /// `NoSpace`, with the needed and free bytes, or another error.
    pub fn allocate_len(&self, bytes: u64) -> Result<()> {
        for (index, part) in self.parts.iter().enumerate() {
            part.allocate_len(self.layout.part_bytes(bytes, index))?;
        }
        Ok(())
    }

    /// Prepares a write of `written_bytes` that ends at `end`. A large write preallocates a plain file: file systems
    /// run writes inside a file concurrently, and extending ones one by one. In a stripe set, every part is extended to
    /// its share, so that the gap before a write beyond the end is readable, unless the set is filled. A plain file does
    /// that by itself.
    pub(crate) fn preallocate(&self, end: u64, written_bytes: u64) -> Result<()> {
        if let [part] = &self.parts[..] {
            return if written_bytes >= PREALLOCATION_BYTES_MIN { part.allocate(end, written_bytes) } else { Ok(()) };
        }
        for (index, part) in self.parts.iter().enumerate() {
            part.extend(self.layout.part_bytes(end, index))?;
        }
        Ok(())
    }

    /// Returns whether a write of this size needs [`preallocate`](Self::preallocate) first.
    pub(crate) fn needs_preallocation(&self, written_bytes: u64) -> bool {
        self.parts.len() > 1 || written_bytes >= PREALLOCATION_BYTES_MIN
    }

    /// Truncates the file to `bytes` if it is longer. Allocates nothing.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn truncate(&self, bytes: u64) -> Result<()> {
        for (index, part) in self.parts.iter().enumerate() {
            part.truncate(self.layout.part_bytes(bytes, index))?;
        }
        Ok(())
    }

    /// Returns whether a read of the range is faster through the page cache: at least seven eighths of its pages are
    /// there. False for a range in several stripes, if direct I/O is required, for block devices and network file
    /// systems, and where the kernel does not report it (before Linux 6.5).
    #[must_use]
    pub fn is_mostly_cached(&self, range: &Range<u64>) -> bool {
        matches!(self.cached_share(range), CachedShare::Most | CachedShare::All)
    }

    /// Returns how much of the range the page cache has, under the same conditions.
    pub(crate) fn cached_share(&self, range: &Range<u64>) -> CachedShare {
        if range.is_empty() || self.contiguous_bytes(range.start) < range.end - range.start {
            return CachedShare::None;
        }
        let (part, at) = self.part_at(range.start);
        let range = at..at + (range.end - range.start);
        let page_bytes = rustix::param::page_size() as u64;
        let pages = (range.end - 1) / page_bytes - range.start / page_bytes + 1;
        part.cached_pages(&range).map_or(CachedShare::None, |cached| CachedShare::of(cached, pages))
    }

    /// Returns how many bytes from `offset` on are contiguous in one part.
    pub(crate) fn contiguous_bytes(&self, offset: u64) -> u64 {
        self.layout.contiguous_bytes(offset)
    }

    /// Reads through the page cache on the calling thread, with one system call, repeated if a signal interrupts it.
    /// The memory must be contiguous, writable and on the host. Returns the bytes read: fewer than requested at the end
    /// of the file or of a stripe, and none beyond the end.
    ///
    /// # Errors
    /// The kernel's error, with the path of the part and the offset in it.
    pub fn read_through_cache(&self, offset: u64, memory: &Region) -> Result<usize> {
        let together = usize::try_from(self.layout.contiguous_bytes(offset)).unwrap_or(usize::MAX);
        let memory = memory.slice(0..memory.len().min(together));
        let (part, offset) = self.part_at(offset);
        let file = part.descriptor(IoMode::Cached)?;
        let op = Op { token: Token(0), kind: OpKind::Read, file, offset, iovecs: smallvec![memory], cufile: None };
        loop {
            match call::perform(&op) {
                Ok(bytes) => return Ok(bytes),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(Error::os("read", errno).at_path(part.path()).at_offset(offset)),
            }
        }
    }

    /// Returns a descriptor of the first part, to lock or stat it.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.parts[0].any().as_fd()
    }

    pub(crate) fn geometry(&self) -> FileGeometry {
        let mut direct = self.parts[0].alignment();
        for part in &self.parts[1..] {
            direct = match (direct, part.alignment()) {
                (Some(a), Some(b)) => {
                    Some(crate::split::FileAlignment { memory: a.memory.max(b.memory), offset: a.offset.max(b.offset) })
                }
                _ => None,
            };
        }
        FileGeometry { direct, layout: self.layout, has_gds: false }
    }

    pub(crate) fn part_at(&self, offset: u64) -> (&Part, u64) {
        let (part, at) = self.layout.locate(offset);
        (&self.parts[part], at)
    }

    pub(crate) fn parts(&self) -> &[Part] {
        &self.parts
    }
}

/// Refuses parts that are one file under two names, such as a link: each would overwrite the stripes of the other.
fn refuse_one_file(parts: &[Part], path: &Path) -> Result<()> {
    if parts.len() < 2 {
        return Ok(());
    }
    let mut seen = HashMap::with_capacity(parts.len());
    for part in parts {
        if let Some(other) = seen.insert(part.stat()?.identity, part.path()) {
            let (one, two) = (display::path(other), display::path(part.path()));
            let detail = format!("the parts {one} and {two} are one file; name a file of its own for each");
            return Err(Error::new(ErrorKind::InvalidInput, "open", detail).at_path(path));
        }
    }
    Ok(())
}
