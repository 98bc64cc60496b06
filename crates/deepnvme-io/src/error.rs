//! The engine's error type: the failure, its place, and the remedy.

use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::display;
use crate::free_space::{Shortage, shortage};
use crate::op::Errno;

/// The result of fallible calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of failure, for programs to decide on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ErrorKind {
    /// No such file or folder.
    NotFound,
    /// Access is denied: by a file, a folder, a read-only file system or a security policy.
    PermissionDenied,
    /// The file ended inside the requested range.
    UnexpectedEof,
    /// The disk, the quota or the file size limit is exhausted.
    NoSpace,
    /// The caller's arguments contradict each other or are out of a documented range.
    InvalidInput,
    /// This kernel, file system, machine or build does not support it.
    Unsupported,
    /// Cancelled before completion.
    Cancelled,
    /// The engine is closed, or belongs to the process before a fork.
    Closed,
    /// Too many requests are queued, or another process holds or replaces a file again and again.
    Busy,
    /// A GPU or its driver reported an error.
    Device,
    /// A file that describes the layout of others is corrupt, or is a different kind of file.
    Corrupt,
    /// Any other error of the kernel (see `errno`), or a failure inside the engine.
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

/// A failed call: kind, operation, path, offset, bytes moved before, and remedy. Cheap to clone.
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
    /// For a full disk: the bytes that the call needs, and the reason.
    needed_bytes: Option<u64>,
    shortage: Option<Shortage>,
}

impl Error {
    /// Creates an error of `operation`. `detail` explains it, and is a clause that contains the remedy.
    #[must_use]
    pub fn new(kind: ErrorKind, operation: &'static str, detail: impl Into<String>) -> Self {
        let detail = detail.into();
        Self(Arc::new(Inner {
            kind,
            operation,
            path: None,
            offset: None,
            bytes_done: 0,
            errno: None,
            detail,
            needed_bytes: None,
            shortage: None,
        }))
    }

    /// Creates an error from the kernel's error number.
    #[must_use]
    pub fn os(operation: &'static str, errno: Errno) -> Self {
        let mut error = Self::new(ErrorKind::of(errno), operation, remedy(errno));
        error.inner_mut().errno = Some(errno);
        error
    }

    /// Converts an error of the standard library, with the kernel's error number if it has one.
    #[must_use]
    pub fn from_io(operation: &'static str, error: &std::io::Error) -> Self {
        match Errno::from_io_error(error) {
            Some(errno) => Self::os(operation, errno),
            None => Self::new(ErrorKind::Io, operation, error.to_string()),
        }
    }

    /// Creates an error for invalid arguments.
    #[must_use]
    pub fn invalid(detail: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidInput, "settings", detail)
    }

    /// Creates the error of a range of `bytes` at `offset` that reaches beyond the end of its file.
    #[must_use]
    pub fn end_of_file(operation: &'static str, file_bytes: u64, offset: u64, bytes: u64) -> Self {
        let available = file_bytes.saturating_sub(offset).min(bytes);
        let detail = if available == bytes {
            format!(
                "the file ends before the size that the system states for it ({file_bytes} bytes); copy files of /proc \
                 and /sys to a disk first, and wait until nothing changes the file"
            )
        } else {
            format!(
                "the file ends too early: it has {file_bytes} bytes; {bytes} were asked for, of which {available} are \
                 there; ask for a range inside the file, or write the file again if it was truncated"
            )
        };
        Self::new(ErrorKind::UnexpectedEof, operation, detail).at_offset(offset).after_bytes(available)
    }

    /// Creates the error of a part of a stripe set that lacks bytes at its end.
    pub(crate) fn short_part(part: &Path, missing: u64) -> Self {
        let detail = format!(
            "this part of a stripe set ends too early: it lacks {missing} bytes that the other parts go with; restore \
             it from a copy, or write the set again"
        );
        Self::new(ErrorKind::UnexpectedEof, "read", detail).at_path(part)
    }

    /// Creates an error for a symbolic link whose target does not exist.
    #[must_use]
    pub fn dangling(operation: &'static str, path: &Path) -> Self {
        let detail = "it is a symbolic link that leads nowhere; remove the link, or make what it points to";
        Self::new(ErrorKind::NotFound, operation, detail).at_path(path)
    }

    /// Creates the error of every call on an engine that was created before a fork.
    pub(crate) fn forked() -> Self {
        let detail = "the engine belongs to the process before the fork; make a new one in this process";
        Self::new(ErrorKind::Closed, "engine", detail)
    }

    /// Sets the file. For a full disk, adds the bytes that are free there.
    #[must_use]
    pub fn at_path(mut self, path: impl Into<PathBuf>) -> Self {
        let (inner, path) = (self.inner_mut(), path.into());
        if inner.errno == Some(Errno::NOSPC) && inner.shortage.is_none() {
            inner.shortage = shortage(&path);
        }
        if inner.errno == Some(Errno::NOENT) && path.starts_with("~") {
            inner.detail = "`~` is a name like any other here; pass os.path.expanduser(path)".into();
        }
        inner.path = Some(path);
        self
    }

    /// For a full disk, sets the bytes that the call needs. Does nothing for other errors.
    #[must_use]
    pub fn needing(mut self, bytes: u64) -> Self {
        if self.0.errno == Some(Errno::NOSPC) {
            self.inner_mut().needed_bytes = Some(bytes);
        }
        self
    }

    /// Sets the offset in the file.
    #[must_use]
    pub fn at_offset(mut self, offset: u64) -> Self {
        self.inner_mut().offset = Some(offset);
        self
    }

    /// Sets the bytes of the request that had been moved.
    #[must_use]
    pub fn after_bytes(mut self, bytes_done: u64) -> Self {
        self.inner_mut().bytes_done = bytes_done;
        self
    }

    /// Replaces the explanation.
    #[must_use]
    pub fn because(mut self, detail: impl Into<String>) -> Self {
        self.inner_mut().detail = detail.into();
        self
    }

    fn inner_mut(&mut self) -> &mut Inner {
        Arc::make_mut(&mut self.0)
    }

    /// Returns the kind.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Returns the operation: `read`, `write`, `open`, ...
    #[must_use]
    pub fn operation(&self) -> &'static str {
        self.0.operation
    }

    /// Returns the file, if any.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.0.path.as_deref()
    }

    /// Returns the byte offset in the file where the call failed. For a range beyond the end of the file, the range's
    /// start.
    #[must_use]
    pub fn offset(&self) -> Option<u64> {
        self.0.offset
    }

    /// Returns the bytes of the request that had been moved before the failure.
    #[must_use]
    pub fn bytes_done(&self) -> u64 {
        self.0.bytes_done
    }

    /// Returns the kernel's error number, if the kernel reported the error.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        self.0.errno.map(Errno::raw_os_error)
    }

    /// Returns the explanation and remedy, without the operation, the path and the offset. [`explanation`] adds the
    /// sizes of a full disk.
    ///
    /// [`explanation`]: Self::explanation
    #[must_use]
    pub fn detail(&self) -> &str {
        &self.0.detail
    }

    /// Returns the explanation and remedy. For a full disk, they begin with the needed and free bytes, unless it lacks
    /// inodes.
    #[must_use]
    pub fn explanation(&self) -> Cow<'_, str> {
        let inner = &*self.0;
        let needed = inner.needed_bytes.map(|bytes| match inner.bytes_done {
            0 => format!("{bytes} bytes are needed"),
            done => format!("{bytes} bytes are needed, of which {done} are written"),
        });
        match (needed, inner.shortage) {
            (_, Some(Shortage::Inodes)) => {
                "the file system can hold no more files (`df -i`); remove some or choose another folder".into()
            }
            (Some(needed), Some(Shortage::Bytes { free })) => {
                format!("{needed}, and {free} are free; {}", inner.detail).into()
            }
            (Some(needed), None) => format!("{needed}; {}", inner.detail).into(),
            (None, Some(Shortage::Bytes { free })) => format!("{free} bytes are free; {}", inner.detail).into(),
            (None, None) => inner.detail.as_str().into(),
        }
    }
}

/// Returns the kernel's text for an error, as Python shows it: `No such file or directory`.
#[must_use]
pub fn kernel_words(errno: Errno) -> String {
    let text = std::io::Error::from(errno).to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &*self.0;
        if let Some(path) = &inner.path {
            write!(f, "{}: ", display::path(path))?;
        }
        f.write_str(inner.operation)?;
        if let Some(offset) = inner.offset {
            write!(f, " at offset {offset}")?;
        }
        f.write_str(": ")?;
        if let Some(errno) = inner.errno {
            write!(f, "{} (errno {})", kernel_words(errno), errno.raw_os_error())?;
            if !inner.detail.is_empty() {
                f.write_str("; ")?;
            }
        }
        f.write_str(&self.explanation())
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
        Errno::FBIG => "the file would be larger than the file system or `ulimit -f` allows",
        Errno::MFILE | Errno::NFILE => "too many open files; raise the limit with `ulimit -n`",
        Errno::NOMEM => "the kernel has no memory for it; lower queue_depth or block_bytes",
        Errno::NOTDIR => "a part of the path is a file; name a folder there",
        Errno::ISDIR => "name a file in it",
        Errno::NAMETOOLONG => "shorten it: most file systems allow 255 bytes for a name with its suffixes",
        Errno::LOOP => "name the file that they should lead to, or remove them",
        Errno::NXIO => "the name belongs to a device that is not there, or to a pipe or a socket; name a file",
        Errno::BADF => "the descriptor is closed, or not open for this direction",
        Errno::IO => "the device reported an error; see `dmesg`",
        Errno::STALE => "the network file system has lost the file; open it again",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_names_needed_and_free_bytes_and_a_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let error = Error::os("write", Errno::NOSPC).at_path(folder.path().join("new")).needing(5000);
        let text = error.to_string();
        assert!(text.contains("5000 bytes are needed, and ") && text.contains(" are free; the disk is full"), "{text}");
        let text = error.after_bytes(4096).to_string();
        assert!(text.contains("5000 bytes are needed, of which 4096 are written, and "), "{text}");
        let text = Error::os("write", Errno::NOSPC).at_path("/no/such/folder/file").to_string();
        assert!(
            !text.contains("are free")
                && text.ends_with("; the disk is full; free some space or choose another folder"),
            "{text}"
        );
        let other = Error::os("write", Errno::IO).at_path(folder.path()).needing(5000);
        assert!(!other.to_string().contains("needed"), "{other}");
    }

    #[test]
    fn a_tilde_is_not_expanded() {
        let text = Error::os("open", Errno::NOENT).at_path("~/x.pt").to_string();
        assert!(text.starts_with("~/x.pt: open: No such file") && text.contains("expanduser"), "{text}");
        let text = Error::os("open", Errno::NOENT).at_path("~x.pt").to_string();
        assert!(text.ends_with("; check the path, and that its folder exists"), "{text}");
    }

    #[test]
    fn the_end_of_a_file_names_sizes_and_a_remedy() {
        let error = Error::end_of_file("read", 100, 90, 40).at_path("weights.bin");
        assert_eq!((error.offset(), error.bytes_done()), (Some(90), 10));
        let text = error.to_string();
        assert!(
            text.starts_with("weights.bin: read at offset 90: the file ends too early: it has 100 bytes"),
            "{text}"
        );
        assert!(text.contains("40 were asked for, of which 10 are there; ask for a range inside"), "{text}");
    }
}
