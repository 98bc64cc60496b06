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
    /// There is no memory for what the file describes.
    #[error("there is no memory for {what}; {bytes} bytes were asked for")]
    Memory {
        /// What needs it.
        what: &'static str,
        /// How much.
        bytes: usize,
    },
}

impl Error {
    pub(crate) fn corrupt(offset: u64, what: impl Into<String>) -> Self {
        Self::Corrupt { offset, what: clipped(what.into()) }
    }

    pub(crate) fn unsupported(what: impl Into<String>) -> Self {
        Self::Unsupported(clipped(what.into()))
    }

    /// Refuses to read what there is no memory for. Parsers allocate in many places, and Rust ends the process where that
    /// fails; so the memory that a text of `bytes` can take, `each` for a byte at the most, is asked for as a whole before.
    pub(crate) fn unless_there_is_room(what: &'static str, bytes: usize, each: usize) -> Result<()> {
        let bytes = bytes.saturating_mul(each);
        let mut room: Vec<u8> = Vec::new();
        room.try_reserve_exact(bytes).map_err(|_| Self::Memory { what, bytes })
    }

    pub(crate) fn invalid(what: impl Into<String>) -> Self {
        Self::Invalid(clipped(what.into()))
    }
}

/// The longest text of an error: names come out of the file, and may be as long as it.
const TEXT_CHARS_MAX: usize = 2000;

/// A text whose middle is left out where it is too long. Its end stays: that is where the remedy stands.
fn clipped(text: String) -> String {
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
        assert_eq!(clipped("short".into()), "short");
    }
}
