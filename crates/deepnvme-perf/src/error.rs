//! What ends a command early, and the exit status that belongs to it.

use std::path::Path;

use deepnvme_io::shown;

/// Why a report, a benchmark or a search could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Something was asked for that makes no sense; exit status 2.
    #[error("{0}")]
    Usage(String),
    /// The machine refused; exit status 1.
    #[error("{0}")]
    Failed(String),
    /// The engine refused; exit status 1.
    #[error(transparent)]
    Engine(#[from] deepnvme_io::Error),
    /// Somebody pressed Ctrl-C, or sent SIGTERM; exit status 1.
    #[error("interrupted; the files that were made have been removed")]
    Interrupted,
    /// The same, after what had been found was printed; exit status 1.
    #[error("interrupted; what was found until then is above")]
    CutShort,
    /// What the answer says is bad news, in short; exit status 1.
    #[error("{0}")]
    BadNews(String),
    /// Whoever read the output has gone; nothing to say, and no failure.
    #[error("the reader of the output has gone")]
    Closed,
}

/// What may end early.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Something that was asked for and makes no sense.
    pub fn usage(text: impl Into<String>) -> Self {
        Self::Usage(text.into())
    }

    /// What the machine refused.
    pub fn failed(text: impl Into<String>) -> Self {
        Self::Failed(text.into())
    }

    /// What the kernel said about a path, and what was being done.
    pub fn at(path: &Path, doing: &str, error: &std::io::Error) -> Self {
        Self::Failed(format!("{}: cannot {doing}: {error}{}", shown::path(path), remedy(error)))
    }

    /// 0 where nobody listened any more, 2 for what was asked wrongly, 1 for the rest.
    #[must_use]
    pub fn exit_status(&self) -> u8 {
        match self {
            Self::Closed => 0,
            Self::Usage(_) => 2,
            Self::Failed(_) | Self::Engine(_) | Self::Interrupted | Self::CutShort | Self::BadNews(_) => 1,
        }
    }
}

fn remedy(error: &std::io::Error) -> &'static str {
    use std::io::ErrorKind;
    match error.kind() {
        ErrorKind::PermissionDenied => "; name a folder that you may write to",
        ErrorKind::NotFound => "; name a folder that exists",
        ErrorKind::StorageFull => "; free some space, or make --size smaller",
        ErrorKind::ReadOnlyFilesystem => "; name a folder on a file system that is mounted read-write",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_has_its_status_and_refusals_teach() {
        let refused = std::io::Error::from_raw_os_error(rustix::io::Errno::ACCESS.raw_os_error());
        let text = Error::at(Path::new("/data"), "make a file", &refused).to_string();
        assert!(
            text.starts_with("/data: cannot make a file: ") && text.ends_with("a folder that you may write to"),
            "{text}"
        );
        assert_eq!(Error::usage("x").exit_status(), 2);
        assert_eq!(Error::Interrupted.exit_status(), 1);
        assert_eq!(Error::Closed.exit_status(), 0);
    }
}
