//! An open file (or stripe set) with a direct and a buffered descriptor for each part.
//!
//! `open` finds a file by name, `adopt` takes over a descriptor, `part` holds the two descriptors of one
//! part, `alignment` asks the kernel what direct I/O needs.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_mem::Region;
use smallvec::smallvec;

use crate::backend::cachestat::cached_pages;
use crate::backend::call;
use crate::config::DirectMode;
use crate::error::{Error, Result};

use crate::fs::{OFlags, Stat};
use crate::layout::Layout;
use crate::op::{Errno, Op, OpKind, Token};
use crate::split::{Channel, Geometry};

mod alignment;
mod part;

pub(crate) use part::Part;

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
    /// Opens a file.
    ///
    /// # Errors
    /// The kernel's refusal, with the path; `Unsupported` when direct I/O is required and not available.
    pub fn open(path: &Path, options: OpenOptions) -> Result<Arc<Self>> {
        Self::open_parts(path, &[path.to_path_buf()], Layout::SINGLE, options)
    }

    /// Opens the parts of one logical file. `path` is the name that errors give.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    ///
    /// # Panics
    /// When the layout is for another number of parts.
    pub fn open_parts(path: &Path, parts: &[PathBuf], layout: Layout, options: OpenOptions) -> Result<Arc<Self>> {
        assert_eq!(layout.parts, parts.len() as u64, "a layout is for as many parts as there are");
        let parts = parts.iter().map(|part| Part::open(part, options)).collect::<Result<Vec<_>>>()?;
        Ok(Arc::new(Self { path: path.to_path_buf(), parts, layout }))
    }

    /// Takes a duplicate of an open descriptor; the caller's own stays as it is, and stays the caller's to close.
    ///
    /// # Errors
    /// `InvalidInput` when it is no regular file or block device, or not open for `access`.
    pub fn from_fd(fd: BorrowedFd<'_>, path: Option<&Path>, access: Access, direct: DirectMode) -> Result<Arc<Self>> {
        let part = Part::adopt(fd, path, access, direct)?;
        Ok(Arc::new(Self { path: part.path().to_path_buf(), parts: vec![part], layout: Layout::SINGLE }))
    }

    /// As [`from_fd`](Self::from_fd), for the parts of one logical file. `path` is the name that errors give.
    ///
    /// # Errors
    /// As [`from_fd`](Self::from_fd).
    ///
    /// # Panics
    /// When the layout is for another number of parts.
    pub fn from_part_fds(
        path: &Path,
        parts: &[(BorrowedFd<'_>, &Path)],
        layout: Layout,
        access: Access,
        direct: DirectMode,
    ) -> Result<Arc<Self>> {
        assert_eq!(layout.parts, parts.len() as u64, "a layout is for as many parts as there are");
        let adopt = |(fd, path): &(BorrowedFd<'_>, &Path)| Part::adopt(*fd, Some(path), access, direct);
        let parts = parts.iter().map(adopt).collect::<Result<Vec<_>>>()?;
        Ok(Arc::new(Self { path: path.to_path_buf(), parts, layout }))
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
        Ok((part.descriptor(Channel::Buffered)?, part.path(), at, self.layout.together_bytes(offset)))
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
    #[must_use]
    pub fn cached_pages(&self, range: &Range<u64>) -> Option<(u64, u64)> {
        let [part] = &self.parts[..] else { return None };
        if range.is_empty() {
            return None;
        }
        let page_bytes = rustix::param::page_size() as u64;
        let pages = (range.end - 1) / page_bytes - range.start / page_bytes + 1;
        Some((cached_pages(part.any().as_fd(), range)?, pages))
    }

    /// Reads through the page cache on the calling thread, with one system call. Returns the bytes read: fewer than asked
    /// for at the end of the file or of a stripe, none behind the end.
    ///
    /// # Errors
    /// The kernel's refusal, with path and offset.
    pub fn read_through_cache(&self, offset: u64, memory: &Region) -> Result<usize> {
        let together = usize::try_from(self.layout.together_bytes(offset)).unwrap_or(usize::MAX);
        let memory = memory.slice(0..memory.len().min(together));
        let (part, offset) = self.part_at(offset);
        let file = part.descriptor(Channel::Buffered)?;
        let op = Op { token: Token(0), kind: OpKind::Read, file, offset, pieces: smallvec![memory], cufile: None };
        loop {
            match call::perform(&op) {
                Ok(bytes) => return Ok(bytes),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(Error::os("read", errno).at_path(part.path()).at_offset(offset)),
            }
        }
    }

    /// The same open file, with every transfer through the page cache; [`direct`](Self::direct) gives the reason.
    ///
    /// # Errors
    /// Where the descriptor through the page cache has yet to be opened, and cannot be.
    pub fn buffered_twin(&self, reason: &str) -> Result<Arc<Self>> {
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
