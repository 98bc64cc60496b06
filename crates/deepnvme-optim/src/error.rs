//! Errors of arguments and of starting threads.

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Slices do not fit each other, or a number is out of range. The text names the problem and what would fit.
    #[error("{0}")]
    Invalid(String),
    /// A thread could not be started.
    #[error(
        "start {threads} threads of a step: {reason}; pass fewer, such as threads=1, or raise the limits on memory and \
         threads (ulimit -v, ulimit -u)"
    )]
    Threads {
        /// The number of threads requested.
        threads: usize,
        /// The system's error.
        reason: String,
    },
}

impl Error {
    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self::Invalid(text.into())
    }
}
