//! The one error type of the engine: what failed, where, and what to do about it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::op::Errno;
use crate::shown;

/// The result of every call that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What kind of failure it was, for a program to decide on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ErrorKind {
    /// No such file or folder.
    NotFound,
    /// The file or folder does not allow it.
    PermissionDenied,
    /// The file ended inside the range that was asked for.
    UnexpectedEof,
    /// The disk, the quota or the file size limit is used up.
    NoSpace,
    /// The caller's arguments contradict each other or a documented range.
    InvalidInput,
    /// This kernel, file system or build does not have it.
    Unsupported,
    /// Cancelled before it was done.
    Cancelled,
    /// The engine is closed, or belongs to the process before a fork.
    Closed,
    /// Too many requests are in flight.
    Busy,
    /// A GPU, or its driver, has refused.
    Device,
    /// A file that says where others lie is damaged, or is something else.
    Corrupt,
    /// Any other refusal of the kernel; see `errno`.
    Io,
}

impl ErrorKind {
    fn of(errno: Errno) -> Self {
        match errno {
            Errno::NOENT => Self::NotFound,
            Errno::ACCESS | Errno::PERM | Errno::ROFS => Self::PermissionDenied,
            Errno::NOSPC | Errno::DQUOT | Errno::FBIG => Self::NoSpace,
            Errno::NOSYS | Errno::OPNOTSUPP => Self::Unsupported,
            _ => Self::Io,
        }
    }
}

/// A failed call: kind, operation, path, offset, bytes that had been moved, and the remedy. Cheap to clone.
#[derive(Clone)]
pub struct Error(Arc<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    operation: &'static str,
    path: Option<PathBuf>,
    offset: Option<u64>,
    bytes_done: u64,
    errno: Option<Errno>,
    detail: String,
}

impl Error {
    /// A failure of `operation` that is explained by `detail` (a clause that says what to do).
    #[must_use]
    pub fn new(kind: ErrorKind, operation: &'static str, detail: impl Into<String>) -> Self {
        let detail = detail.into();
        Self(Arc::new(Inner { kind, operation, path: None, offset: None, bytes_done: 0, errno: None, detail }))
    }

    /// A refusal of the kernel.
    #[must_use]
    pub fn os(operation: &'static str, errno: Errno) -> Self {
        let mut error = Self::new(ErrorKind::of(errno), operation, remedy(errno));
        error.inner_mut().errno = Some(errno);
        error
    }

    /// A refusal that the standard library tells of, with the kernel's error number where it has one.
    #[must_use]
    pub fn from_io(operation: &'static str, error: &std::io::Error) -> Self {
        match Errno::from_io_error(error) {
            Some(errno) => Self::os(operation, errno),
            None => Self::new(ErrorKind::Io, operation, error.to_string()),
        }
    }

    /// Arguments that cannot be meant.
    #[must_use]
    pub fn invalid(detail: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidInput, "settings", detail)
    }

    /// A name that is a symbolic link to a file that is not there.
    #[must_use]
    pub fn dangling(operation: &'static str, path: &Path) -> Self {
        let detail = "it is a symbolic link that leads nowhere; remove the link, or make what it points to";
        Self::new(ErrorKind::NotFound, operation, detail).at_path(path)
    }

    /// That of every call on an engine that was made before a fork.
    pub(crate) fn forked() -> Self {
        let detail = "the engine belongs to the process before the fork; make a new one in this process";
        Self::new(ErrorKind::Closed, "engine", detail)
    }

    /// The same error, naming the file.
    #[must_use]
    pub fn at_path(mut self, path: impl Into<PathBuf>) -> Self {
        self.inner_mut().path = Some(path.into());
        self
    }

    /// The same error, naming the place in the file.
    #[must_use]
    pub fn at_offset(mut self, offset: u64) -> Self {
        self.inner_mut().offset = Some(offset);
        self
    }

    /// The same error, saying how many bytes of the request had been moved.
    #[must_use]
    pub fn after_bytes(mut self, bytes_done: u64) -> Self {
        self.inner_mut().bytes_done = bytes_done;
        self
    }

    /// The same error with another explanation.
    #[must_use]
    pub fn because(mut self, detail: impl Into<String>) -> Self {
        self.inner_mut().detail = detail.into();
        self
    }

    fn inner_mut(&mut self) -> &mut Inner {
        Arc::make_mut(&mut self.0)
    }

    /// What kind of failure it was.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// What was being done: `read`, `write`, `open`, ...
    #[must_use]
    pub fn operation(&self) -> &'static str {
        self.0.operation
    }

    /// The file, where one was involved.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.0.path.as_deref()
    }

    /// The byte offset in the file at which it failed.
    #[must_use]
    pub fn offset(&self) -> Option<u64> {
        self.0.offset
    }

    /// Bytes of the request that had been moved when it failed.
    #[must_use]
    pub fn bytes_done(&self) -> u64 {
        self.0.bytes_done
    }

    /// The kernel's error number.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        self.0.errno.map(Errno::raw_os_error)
    }

    /// What happened and what to do, without the operation, the path and the offset.
    #[must_use]
    pub fn detail(&self) -> &str {
        &self.0.detail
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &*self.0;
        f.write_str(inner.operation)?;
        if let Some(path) = &inner.path {
            write!(f, " {}", shown::path(path))?;
        }
        if let Some(offset) = inner.offset {
            write!(f, " at offset {offset}")?;
        }
        f.write_str(": ")?;
        if let Some(errno) = inner.errno {
            write!(f, "{} (errno {})", std::io::Error::from(errno).kind(), errno.raw_os_error())?;
            if !inner.detail.is_empty() {
                f.write_str("; ")?;
            }
        }
        f.write_str(&inner.detail)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Error({:?}: {self})", self.0.kind)
    }
}

impl std::error::Error for Error {}

fn remedy(errno: Errno) -> &'static str {
    match errno {
        Errno::NOENT => "check the path, and that its folder exists",
        Errno::ACCESS | Errno::PERM => "check the permissions of the file and its folder",
        Errno::ROFS => "the file system is mounted read-only; choose another folder",
        Errno::NOSPC => "the disk is full; free some space or choose another folder",
        Errno::DQUOT => "the quota is used up; free some space or choose another folder",
        Errno::FBIG => "the file size limit is reached; raise it with `ulimit -f`",
        Errno::MFILE | Errno::NFILE => "too many open files; raise the limit with `ulimit -n`",
        Errno::NOMEM => "the kernel has no memory for it; lower queue_depth or block_bytes",
        Errno::ISDIR => "the path is a folder; name a file in it",
        Errno::LOOP => "name the file that they should lead to, or remove them",
        Errno::NXIO => "the name belongs to a socket, or to a device that is not there; name a file",
        Errno::BADF => "the descriptor is closed, or not open for this direction",
        Errno::IO => "the device reported an error; see `dmesg`",
        Errno::STALE => "the network file system has lost the file; open it again",
        _ => "",
    }
}
