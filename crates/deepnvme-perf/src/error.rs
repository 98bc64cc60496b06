//! Errors that end a command, and their exit status.

use std::path::Path;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Invalid arguments; exit status 2.
    #[error("{0}")]
    Usage(String),
    /// The machine, its files or another program do not allow the work; exit status 1.
    #[error("{0}")]
    Failed(String),
    /// An error of the engine; exit status 1.
    #[error(transparent)]
    Engine(#[from] deepnvme_io::Error),
    /// An error of a library above the engine; exit status 1.
    #[error(transparent)]
    Library(Box<dyn std::error::Error + Send + Sync>),
    /// Ctrl-C or SIGTERM; exit status 1.
    #[error("interrupted; the temporary files have been removed")]
    Interrupted,
    /// Ctrl-C or SIGTERM, after the result so far was printed; exit status 1.
    #[error("interrupted; the result so far is above")]
    InterruptedWithResult,
    /// The command ran, and its result is a failure: a damaged file, for example; exit status 1.
    #[error("{0}")]
    Failure(String),
    /// A program that ran for this one failed, and has printed why; its exit status, no message.
    #[error("a program failed with exit status {0}")]
    Told(u8),
    /// The reader closed the output, as `head` does; no message, exit status 0.
    #[error("the reader closed the output")]
    OutputClosed,
}

/// The result of anything that can fail with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Makes a `Usage` error.
    pub fn usage(text: impl Into<String>) -> Self {
        Self::Usage(text.into())
    }

    /// Makes a `Failed` error.
    pub fn failed(text: impl Into<String>) -> Self {
        Self::Failed(text.into())
    }

    /// Makes an `Engine` error from an I/O error, with the path, the operation (such as "cannot make a file") and a
    /// remedy.
    pub fn at(path: &Path, operation: &'static str, error: &std::io::Error) -> Self {
        let failed = deepnvme_io::Error::from_io(operation, error).at_path(path);
        Self::Engine(match remedy(error) {
            Some(remedy) => failed.because(remedy),
            None => failed,
        })
    }

    /// Returns the exit status: 0 for a closed output, 2 for invalid arguments, 1 for all else.
    #[must_use]
    pub fn exit_status(&self) -> u8 {
        match self {
            Self::OutputClosed => 0,
            Self::Told(status) => *status,
            Self::Usage(_) => 2,
            Self::Failed(_)
            | Self::Engine(_)
            | Self::Library(_)
            | Self::Interrupted
            | Self::InterruptedWithResult
            | Self::Failure(_) => 1,
        }
    }
}

fn remedy(error: &std::io::Error) -> Option<&'static str> {
    use std::io::ErrorKind;
    match error.kind() {
        ErrorKind::PermissionDenied => Some("name a folder that you may write to"),
        ErrorKind::NotFound => Some("name a folder that exists"),
        ErrorKind::StorageFull => Some("free some space, or make --size smaller"),
        ErrorKind::ReadOnlyFilesystem => Some("name a folder on a file system that is mounted read-write"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_an_exit_status_and_a_remedy() {
        let refused = std::io::Error::from_raw_os_error(rustix::io::Errno::ACCESS.raw_os_error());
        let error = Error::at(Path::new("/data"), "cannot make a file", &refused);
        let text = error.to_string();
        assert_eq!(
            text,
            "/data: cannot make a file: Permission denied (errno 13); name a folder that you may write to"
        );
        assert!(matches!(error, Error::Engine(error) if error.errno() == Some(13)));
        assert_eq!(Error::usage("x").exit_status(), 2);
        assert_eq!(Error::Interrupted.exit_status(), 1);
        assert_eq!(Error::OutputClosed.exit_status(), 0);
    }
}
