//! Errors of packed bytes and of arguments.

/// The result of every fallible call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Invalid packed bytes, or arguments that do not fit each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The data is truncated, corrupt or malicious.
    #[error("at offset {offset} of the block: {what}")]
    Corrupt {
        /// Offset from the start of the block.
        offset: usize,
        /// The problem.
        what: String,
    },
    /// Invalid arguments; the text says why.
    #[error("{0}")]
    Invalid(String),
}

impl Error {
    pub(crate) fn corrupt(offset: usize, what: impl Into<String>) -> Self {
        Self::Corrupt { offset, what: what.into() }
    }

    pub(crate) fn invalid(what: impl Into<String>) -> Self {
        Self::Invalid(what.into())
    }
}
