//! What can be wrong with packed bytes, and with what a caller asks for.

/// The result of every call that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Bytes that are not what they say they are, or slices that do not fit each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The bytes contradict the format or each other: a damaged or a hostile file.
    #[error("at offset {offset} of the block: {what}")]
    Corrupt {
        /// Where, counted from the first byte of the block.
        offset: usize,
        /// What is wrong there.
        what: String,
    },
    /// What the caller asks for cannot be done; the text says why.
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
