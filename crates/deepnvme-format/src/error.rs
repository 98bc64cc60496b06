//! What can be wrong with a file's contents.

/// The result of every call that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A file that is not what it says it is, or that this crate does not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The bytes contradict the format or each other: a damaged or a hostile file.
    #[error("at offset {offset}: {what}")]
    Corrupt {
        /// Where in the file.
        offset: u64,
        /// What is wrong there.
        what: String,
    },
    /// A format, or a part of one, that is understood but not read; the text says what to do.
    #[error("{0}")]
    Unsupported(String),
    /// What the caller asks for cannot be laid out; the text says why.
    #[error("{0}")]
    Invalid(String),
}

impl Error {
    pub(crate) fn corrupt(offset: u64, what: impl Into<String>) -> Self {
        Self::Corrupt { offset, what: what.into() }
    }

    pub(crate) fn unsupported(what: impl Into<String>) -> Self {
        Self::Unsupported(what.into())
    }

    pub(crate) fn invalid(what: impl Into<String>) -> Self {
        Self::Invalid(what.into())
    }
}
