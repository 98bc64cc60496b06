//! What can be wrong with what a caller hands in.

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Slices do not fit each other, or a number is out of its range; the text says which and what would fit.
    #[error("{0}")]
    Invalid(String),
    /// The system gave no thread.
    #[error("cannot start {threads} threads: {reason}; ask for fewer")]
    Threads {
        /// How many were asked for.
        threads: usize,
        /// What the system said.
        reason: String,
    },
}

impl Error {
    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self::Invalid(text.into())
    }
}
