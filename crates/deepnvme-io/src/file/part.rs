//! One part file. Its direct descriptor is opened at once. Its buffered descriptor is opened on first use, or at once
//! if there is no direct one.

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::alignment::{self, Found};
use super::page_cache;
use super::{Access, DirectState, OpenOptions};
use crate::backend::gds::Gds;
use crate::config::DirectMode;
use crate::error::{Error, ErrorKind, Result};
use crate::fs::{self, FileKind, OFlags, Stat};
use crate::op::{Errno, RegisteredFile};
use crate::split::{FileAlignment, IoMode};
use crate::sync::{Mutex, OnceLock, lock, thread};

/// How often, and in which interval, the lock for an extension is tried: for half a second.
const EXTENSION_TRIES_MAX: u32 = 50;
const EXTENSION_PAUSE: Duration = Duration::from_millis(10);
const DISABLED: &str = "direct I/O was disabled";

/// One open file of the file system.
#[derive(Debug)]
pub(crate) struct Part {
    path: PathBuf,
    /// Its absolute folder, to sync it even after the process has changed its working directory. `None` for files that
    /// are only read.
    folder: Option<PathBuf>,
    access: Access,
    /// Open for direct I/O, with its alignment.
    direct: Option<(Arc<OwnedFd>, FileAlignment)>,
    /// Open through the page cache. Opened from the direct descriptor when it is first needed, for instance by a ragged
    /// edge.
    buffered: OnceLock<Arc<OwnedFd>>,
    /// Open to read bytes that are in the page cache, on first use. `None` if it cannot be opened.
    cached: OnceLock<Option<Arc<OwnedFd>>>,
    requires_direct: bool,
    /// Why transfers are buffered. Set when opening or at the first refusal of a direct one.
    buffered_reason: OnceLock<String>,
    /// Its registration with cuFile, or the reason why there is none.
    cufile_registration: OnceLock<Result<RegisteredFile, String>>,
    gds_refusal: OnceLock<String>,
    has_coherent_cache: OnceLock<bool>,
    /// Held while the part is extended under its lock. Whether to wait for that lock: not again after the first time
    /// that it stayed taken.
    waits_to_extend: Mutex<bool>,
}

impl Part {
    pub(super) fn open(path: &Path, options: OpenOptions) -> Result<Self> {
        // Linux creates the file before the file system refuses O_DIRECT. A refused open must not leave a file.
        let may_be_refused = options.create && options.direct == DirectMode::Required;
        // EXCL proves that this call created the file. Otherwise the cleanup could remove another process's file.
        let created =
            may_be_refused.then(|| fs::open(path, options.access.flags() | OFlags::CREATE | OFlags::EXCL, 0o666));
        let created = created.and_then(Result::ok).and_then(|file| fs::stat_of(file.as_fd()).ok());
        let opened = Self::open_or_create(path, options);
        if let Some(created) = created
            && opened.as_ref().is_err_and(|error| error.kind() == ErrorKind::Unsupported)
            && fs::stat_link(path).is_ok_and(|stat| (stat.identity, stat.bytes) == (created.identity, 0))
        {
            let _ = fs::unlink(path);
        }
        opened
    }

    fn open_or_create(path: &Path, options: OpenOptions) -> Result<Self> {
        let mut flags = options.access.flags();
        if options.create {
            flags |= OFlags::CREATE;
        }
        // Without NONBLOCK, opening a pipe would wait for its other end.
        let open = |extra: OFlags| {
            let fd = fs::open(path, flags | extra | OFlags::NONBLOCK, 0o666)?;
            fs::set_open_flags(fd.as_fd(), extra)?;
            Ok(fd)
        };
        let fail = |errno: Errno| {
            // For a pipe without a reader, or a socket, the kernel says only ENXIO. The type is the better message.
            let stat = if errno == Errno::NXIO { fs::stat(path).ok() } else { None };
            let wrong_type = stat.and_then(|stat| check_type(&stat, path).err());
            wrong_type.unwrap_or_else(|| Error::os("open", errno).at_path(path))
        };
        let mut part = Self::empty(path.to_path_buf(), options.access, options.direct);
        if options.direct != DirectMode::Disabled {
            match open(OFlags::DIRECT) {
                Ok(fd) => part.set_direct(fd, &fail)?,
                Err(Errno::INVAL | Errno::OPNOTSUPP) => part.refuse_direct("the file system refuses O_DIRECT")?,
                Err(errno) => return Err(fail(errno)),
            }
        }
        if part.direct.is_none() {
            let fd = open(OFlags::empty()).map_err(fail)?;
            check_type(&fs::stat_of(fd.as_fd()).map_err(fail)?, path)?;
            let _ = part.buffered.set(Arc::new(fd));
        }
        Ok(part)
    }

    pub(super) fn adopt(fd: BorrowedFd<'_>, path: Option<&Path>, access: Access, direct: DirectMode) -> Result<Self> {
        let path = path.map_or_else(|| name_of(fd), Path::to_path_buf);
        let fail = |errno: Errno| Error::os("open", errno).at_path(&path);
        let flags = fs::open_flags(fd).map_err(fail)?;
        let own = rustix::io::fcntl_dupfd_cloexec(fd, 0).map_err(fail)?;
        check_type(&fs::stat_of(own.as_fd()).map_err(fail)?, &path)?;
        check_access(flags, access).map_err(|error| error.at_path(&path))?;
        let mut part = Self::empty(path.clone(), access, direct);
        // Linux appends every write to an O_APPEND descriptor, whatever its offset, direct or not.
        let own = if flags.contains(OFlags::APPEND) && access != Access::Read {
            fs::reopen(own.as_fd(), access.flags() | (flags & OFlags::DIRECT)).map_err(fail)?
        } else {
            own
        };
        if flags.contains(OFlags::DIRECT) {
            part.set_direct(own, &fail)?;
        } else {
            if direct != DirectMode::Disabled {
                match fs::reopen(own.as_fd(), access.flags() | OFlags::DIRECT) {
                    Ok(direct) => part.set_direct(direct, &fail)?,
                    Err(_) => part.refuse_direct("the descriptor cannot be reopened with O_DIRECT")?,
                }
            }
            let _ = part.buffered.set(Arc::new(own));
        }
        // The caller's descriptor is open for direct I/O, and the file has none.
        if part.direct.is_none() && part.buffered.get().is_none() {
            let buffered = fs::reopen(fd, access.flags()).map_err(fail)?;
            let _ = part.buffered.set(Arc::new(buffered));
        }
        Ok(part)
    }

    fn empty(path: PathBuf, access: Access, mode: DirectMode) -> Self {
        let buffered_reason = OnceLock::new();
        if mode == DirectMode::Disabled {
            let _ = buffered_reason.set(DISABLED.into());
        }
        let requires_direct = mode == DirectMode::Required;
        let folder = (access != Access::Read)
            .then(|| fs::folder_of(&path))
            .map(|folder| std::path::absolute(folder).unwrap_or_else(|_| folder.to_path_buf()));
        let (cufile_registration, gds_refusal) = (OnceLock::new(), OnceLock::new());
        let (direct, buffered, cached, has_coherent_cache) = (None, OnceLock::new(), OnceLock::new(), OnceLock::new());
        Self {
            path,
            folder,
            access,
            direct,
            buffered,
            cached,
            requires_direct,
            buffered_reason,
            cufile_registration,
            gds_refusal,
            has_coherent_cache,
            waits_to_extend: Mutex::new(true),
        }
    }

    fn set_direct(&mut self, fd: OwnedFd, fail: &dyn Fn(Errno) -> Error) -> Result<()> {
        let stat = fs::stat_of(fd.as_fd()).map_err(fail)?;
        check_type(&stat, &self.path)?;
        match alignment::find(fd.as_fd(), &stat) {
            Found::Aligned(alignment) => self.direct = Some((Arc::new(fd), alignment)),
            Found::None(reason) => self.refuse_direct(reason)?,
        }
        Ok(())
    }

    /// Records that direct I/O does not work on this file. Fails if direct I/O is required.
    pub(crate) fn refuse_direct(&self, reason: &str) -> Result<()> {
        if self.requires_direct {
            let detail = format!("{reason}, and direct I/O is required; use direct=\"preferred\" or another folder");
            return Err(Error::new(ErrorKind::Unsupported, "open", detail).at_path(&self.path));
        }
        let _ = self.buffered_reason.set(reason.into());
        Ok(())
    }

    /// Registers the file with cuFile, once. The error is the reason why cuFile refuses the file, or has refused a
    /// transfer.
    pub(crate) fn prepare_gds(&self, gds: &Gds) -> Result<(), String> {
        if let Some(reason) = self.gds_refusal.get() {
            return Err(reason.clone());
        }
        let known = self.cufile_registration.get_or_init(|| match &self.direct {
            Some((file, _)) => gds.register_file(file),
            None => {
                Err(format!("the file has no direct I/O ({})", self.buffered_reason.get().map_or("", String::as_str)))
            }
        });
        known.as_ref().map(drop).map_err(Clone::clone)
    }

    /// Returns the file's registration with cuFile, if any.
    pub(crate) fn cufile_registration(&self) -> Option<RegisteredFile> {
        self.cufile_registration.get()?.as_ref().ok().cloned()
    }

    /// Records that cuFile has refused a transfer. Later ones use bounce buffers.
    pub(crate) fn refuse_gds(&self, reason: &str) {
        let _ = self.gds_refusal.set(reason.into());
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn alignment(&self) -> Option<FileAlignment> {
        let (_, alignment) = self.direct.as_ref()?;
        self.buffered_reason.get().is_none().then_some(*alignment)
    }

    pub(super) fn direct_state(&self) -> DirectState {
        match (self.alignment(), self.buffered_reason.get()) {
            (Some(alignment), _) => DirectState::Direct {
                memory_alignment_bytes: alignment.memory.bytes(),
                offset_alignment_bytes: alignment.offset.bytes(),
            },
            (None, reason) => DirectState::Buffered { reason: reason.cloned().unwrap_or_default() },
        }
    }

    /// Returns the descriptor for direct, buffered or cached I/O. Without one for direct I/O or for cached bytes, returns
    /// the buffered one, which is opened on first use.
    pub(crate) fn descriptor(&self, mode: IoMode) -> Result<Arc<OwnedFd>> {
        if let (IoMode::Cached, Some(fd)) = (mode, self.cached.get().and_then(Option::as_ref)) {
            return Ok(Arc::clone(fd));
        }
        if let (IoMode::Direct, Some((fd, _))) = (mode, &self.direct) {
            return Ok(Arc::clone(fd));
        }
        if let Some(fd) = self.buffered.get() {
            return Ok(Arc::clone(fd));
        }
        let fd = self
            .reopen(self.access.flags())
            .map_err(|errno| Error::os("reopen without O_DIRECT", errno).at_path(&self.path))?;
        Ok(Arc::clone(self.buffered.get_or_init(|| Arc::new(fd))))
    }

    /// Returns how many pages of a range are in the page cache. `None` if the kernel does not report it, or if reads of
    /// the part may not use the cache: direct I/O is required, the cache may be older than the device, or no buffered
    /// descriptor can be opened.
    pub(super) fn cached_pages(&self, range: &Range<u64>) -> Option<u64> {
        let is_coherent = || self.stat().is_ok_and(|stat| page_cache::is_coherent(self.any().as_fd(), &stat));
        if self.requires_direct || (self.direct.is_some() && !*self.has_coherent_cache.get_or_init(is_coherent)) {
            return None;
        }
        let pages = fs::cached_pages(self.any().as_fd(), range).ok()?;
        (pages == 0 || self.cached_descriptor().is_some()).then_some(pages)
    }

    /// Returns the descriptor for reads of bytes in the page cache, opened on first use. Where pages have gone since, a
    /// read brings back these pages only, one by one. Read-ahead would bring neighbours in large folios. If a buffered
    /// write made such a folio dirty, the kernel could not drop it after a direct write to another part of it.
    fn cached_descriptor(&self) -> Option<&Arc<OwnedFd>> {
        let open = || {
            let file = self.reopen(OFlags::RDONLY).ok()?;
            fs::advise_random(file.as_fd()).ok()?;
            Some(Arc::new(file))
        };
        self.cached.get_or_init(open).as_ref()
    }

    /// Opens a second, independent description of the file.
    fn reopen(&self, flags: OFlags) -> Result<OwnedFd, Errno> {
        match fs::reopen(self.any().as_fd(), flags) {
            // Reopening goes through /proc, which a container may not have.
            Err(Errno::NOENT) => self.reopen_by_name(flags),
            reopened => reopened,
        }
    }

    /// Opens the file by its name, if the name still refers to this file.
    fn reopen_by_name(&self, flags: OFlags) -> Result<OwnedFd, Errno> {
        let file = fs::open(&self.path, flags | OFlags::NONBLOCK, 0)?;
        fs::set_open_flags(file.as_fd(), OFlags::empty())?;
        let (own, found) = (fs::stat_of(self.any().as_fd())?, fs::stat_of(file.as_fd())?);
        if own.identity == found.identity { Ok(file) } else { Err(Errno::NOENT) }
    }

    /// Returns an open descriptor: the direct one, or else the buffered one.
    pub(crate) fn any(&self) -> &Arc<OwnedFd> {
        match (&self.direct, self.buffered.get()) {
            (Some((fd, _)), _) | (None, Some(fd)) => fd,
            (None, None) => unreachable!("a part is opened with one descriptor at least"),
        }
    }

    pub(crate) fn stat(&self) -> Result<Stat> {
        fs::stat_of(self.any().as_fd()).map_err(|errno| Error::os("stat", errno).at_path(&self.path))
    }

    pub(crate) fn len(&self) -> Result<u64> {
        self.stat().map(|stat| stat.bytes)
    }

    /// Returns the folder that contains the file's name; `None` for files that are only read.
    pub(crate) fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Returns whether the file has a name. Deleted and unnamed files have none.
    pub(crate) fn has_name(&self) -> bool {
        fs::stat_of(self.any().as_fd()).is_ok_and(|stat| stat.links > 0)
    }

    pub(super) fn truncate(&self, bytes: u64) -> Result<()> {
        if self.len()? <= bytes {
            return Ok(());
        }
        fs::truncate(self.any().as_fd(), bytes).map_err(|errno| Error::os("truncate", errno).at_path(&self.path))
    }

    pub(super) fn allocate_len(&self, bytes: u64) -> Result<()> {
        let fail = |operation, errno| Error::os(operation, errno).at_path(&self.path);
        let stat = fs::stat_of(self.any().as_fd()).map_err(|errno| fail("stat", errno))?;
        if stat.kind == FileKind::BlockDevice {
            return Ok(());
        }
        if stat.bytes > bytes {
            return fs::truncate(self.any().as_fd(), bytes).map_err(|errno| fail("truncate", errno));
        }
        if stat.bytes == bytes {
            return Ok(());
        }
        let missing_bytes = bytes - stat.bytes;
        // Only what is missing: XFS asks for free space for the whole range, even for blocks that the file has.
        match fs::allocate(self.any().as_fd(), stat.bytes, missing_bytes) {
            Ok(()) => Ok(()),
            // Some file systems cannot allocate. Writes then extend the file.
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Ok(()),
            Err(errno) => {
                // Undo the partial allocation.
                let _ = fs::truncate(self.any().as_fd(), stat.bytes);
                Err(fail("allocate", errno).needing(missing_bytes))
            }
        }
    }

    /// Extends the part to `bytes`, if it is shorter. It allocates the last byte rather than set the length: if another
    /// writer has extended the part meanwhile, its bytes stay.
    pub(super) fn extend(&self, bytes: u64) -> Result<()> {
        if self.access == Access::Fill {
            return Ok(());
        }
        let stat = fs::stat_of(self.any().as_fd()).map_err(|errno| Error::os("stat", errno).at_path(&self.path))?;
        if stat.bytes >= bytes || stat.kind == FileKind::BlockDevice {
            return Ok(());
        }
        match fs::allocate(self.any().as_fd(), bytes - 1, 1) {
            Ok(()) => Ok(()),
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => self.extend_with_hole(bytes),
            Err(errno) => Err(Error::os("allocate", errno).at_path(&self.path).needing(bytes - stat.bytes)),
        }
    }

    /// Extends the part where the file system cannot allocate, by setting its length. A lock keeps the other writers of
    /// the set from extending it between the look at its length and the change, which would cut off their bytes: each
    /// request extends the parts before its first block. Without the lock, the part stays as it is, and a gap reads as
    /// an early end until it is written.
    fn extend_with_hole(&self, bytes: u64) -> Result<()> {
        // The lock of a descriptor does not keep out the threads that share it.
        let mut waits_to_extend = lock(&self.waits_to_extend);
        let file = self.any().as_fd();
        for _ in 0..if *waits_to_extend { EXTENSION_TRIES_MAX } else { 1 } {
            match fs::try_lock(file) {
                Ok(true) => {
                    let is_short = fs::stat_of(file).map(|stat| stat.bytes < bytes);
                    let extended =
                        is_short.and_then(|is_short| if is_short { fs::truncate(file, bytes) } else { Ok(()) });
                    let _ = fs::unlock(file);
                    return extended.map_err(|errno| Error::os("truncate", errno).at_path(&self.path));
                }
                Ok(false) if *waits_to_extend => thread::sleep(EXTENSION_PAUSE),
                Ok(false) | Err(_) => return Ok(()),
            }
        }
        *waits_to_extend = false;
        Ok(())
    }

    /// Allocates the bytes that a write adds to a regular file. The write has `written_bytes` bytes and ends at `end`.
    /// A failed allocation is no error: the write itself reports a full disk, with the bytes written so far.
    pub(super) fn allocate(&self, end: u64, written_bytes: u64) -> Result<()> {
        let stat = fs::stat_of(self.any().as_fd()).map_err(|errno| Error::os("stat", errno).at_path(&self.path))?;
        let start = stat.bytes.max(end.saturating_sub(written_bytes));
        if start < end && stat.kind == FileKind::File {
            let _ = fs::allocate(self.any().as_fd(), start, end - start);
        }
        Ok(())
    }
}

fn name_of(fd: BorrowedFd<'_>) -> PathBuf {
    fs::resolved_path(fd).unwrap_or_else(|_| PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd())))
}

fn check_type(stat: &Stat, path: &Path) -> Result<()> {
    match stat.kind {
        FileKind::File | FileKind::BlockDevice => Ok(()),
        FileKind::Folder => Err(Error::os("open", Errno::ISDIR).at_path(path)),
        other => {
            let detail = format!("it is {}; only regular files and block devices have offsets", other.name());
            Err(Error::new(ErrorKind::InvalidInput, "open", detail).at_path(path))
        }
    }
}

fn check_access(flags: OFlags, access: Access) -> Result<()> {
    let has = flags & OFlags::ACCMODE;
    if has == OFlags::RDWR || has == access.flags() {
        return Ok(());
    }
    let wanted = match access {
        Access::Read => "reading",
        Access::Write => "writing",
        Access::ReadWrite | Access::Fill => "reading and writing",
    };
    let detail = format!("the descriptor is not open for {wanted}; open it in another mode");
    Err(Error::new(ErrorKind::InvalidInput, "open", detail))
}
