//! Errors of a file's contents.

/// The result of every fallible call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Invalid or unsupported file contents, a layout that is impossible, or too little memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The data is truncated, corrupt or malicious. The remedy is the same for all.
    #[error("at offset {offset}: {what}; restore the file from a copy, or write it again")]
    Corrupt {
        /// Offset in the file or, for a text or pickle inside it, in that; 0 if it is unknown.
        offset: u64,
        /// The problem.
        what: String,
    },
    /// A known but unsupported format or feature; the text names the remedy.
    #[error("{0}")]
    Unsupported(String),
    /// The caller's request cannot be laid out; the text says why.
    #[error("{0}")]
    Invalid(String),
    /// There is not enough memory for the contents.
    #[error("not enough memory for {what}: {bytes} bytes are needed")]
    Memory {
        /// The part that needs the memory.
        what: &'static str,
        /// The bytes it needs.
        bytes: usize,
    },
}

impl Error {
    pub(crate) fn corrupt(offset: u64, what: impl Into<String>) -> Self {
        Self::Corrupt { offset, what: shortened(what.into()) }
    }

    pub(crate) fn unsupported(what: impl Into<String>) -> Self {
        Self::Unsupported(shortened(what.into()))
    }

    /// Checks that the memory for parsing is available. Parsers allocate in many places, and Rust aborts when an
    /// allocation fails. So the most memory that a text of `bytes` can take, `factor` for each byte, is allocated as
    /// a whole first.
    ///
    /// # Errors
    /// `Memory` if it is not available.
    pub fn check_memory(what: &'static str, bytes: usize, factor: usize) -> Result<()> {
        let bytes = bytes.saturating_mul(factor);
        let mut probe: Vec<u8> = Vec::new();
        probe.try_reserve_exact(bytes).map_err(|_| Self::Memory { what, bytes })
    }

    pub(crate) fn invalid(what: impl Into<String>) -> Self {
        Self::Invalid(shortened(what.into()))
    }
}

/// The number of characters that a shortened text keeps. Names come from the file and may be as long as the file.
const TEXT_CHARS_MAX: usize = 2000;

/// Shortens a text in the middle. The end stays, since it has the remedy.
fn shortened(text: String) -> String {
    let half = TEXT_CHARS_MAX / 2;
    let mut places = text.char_indices().map(|(place, _)| place);
    let (Some(head), Some(tail)) = (places.nth(half), places.nth_back(half - 1)) else { return text };
    format!("{} [...] {}", &text[..head], &text[tail..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_keep_both_ends() {
        let Error::Unsupported(text) = Error::unsupported(format!("a{}z", "\u{e4}".repeat(1 << 20))) else { panic!() };
        assert!(text.chars().count() == TEXT_CHARS_MAX + 7, "{}", text.len());
        assert!(text.starts_with('a') && text.ends_with('z') && text.contains(" [...] "));
        assert_eq!(shortened("short".into()), "short");
    }
}
