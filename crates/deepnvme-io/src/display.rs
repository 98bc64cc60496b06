//! Formats names and sizes for messages and tables. The output never moves a terminal's cursor, and no byte of a name
//! is lost.
//!
//! Names of files and tensors are untrusted. A control character could clear a screen or forge a line, and a character
//! that reverses text could hide the end of a name.

use std::fmt::{self, Display, Formatter, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use serde::Serializer;

/// A name, with escapes for invalid UTF-8 and for control characters ([`is_control`]).
#[derive(Clone, Copy, Debug)]
pub struct Escaped<'a>(&'a [u8]);

/// Formats a file name.
#[must_use]
pub fn path(path: &Path) -> Escaped<'_> {
    Escaped(path.as_os_str().as_bytes())
}

/// Formats any other name.
#[must_use]
pub const fn text(text: &str) -> Escaped<'_> {
    Escaped(text.as_bytes())
}

/// Formats a size in the largest binary unit in which it has whole quarters, unless it has 2,048 or more of that unit:
/// `512 KiB`, `1.5 GiB`. Otherwise, rounds it to two decimals of the largest unit from MiB on, or gives the bytes:
/// `2.00 GiB`, `114.44 MiB`, `4097 bytes`.
#[must_use]
pub fn bytes(bytes: u64) -> String {
    for (unit, shift) in [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)] {
        // Quarters are easy to read.
        if (1..2048).contains(&(bytes >> shift)) && bytes.is_multiple_of(1 << (shift - 2)) {
            return format!("{} {unit}", bytes as f64 / (1_u64 << shift) as f64);
        }
    }
    for (unit, shift) in [("TiB", 40), ("GiB", 30), ("MiB", 20)] {
        if bytes >= 1 << shift {
            return format!("{:.2} {unit}", bytes as f64 / (1_u64 << shift) as f64);
        }
    }
    format!("{bytes} bytes")
}

/// Serialises a path: unchanged, or as [`path`] formats it if it is not UTF-8.
///
/// # Errors
/// The errors of `serializer`.
pub fn serialize<S: Serializer>(named: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    match named.to_str() {
        Some(text) => serializer.serialize_str(text),
        None => serializer.collect_str(&path(named)),
    }
}

/// Serialises several paths, each as [`serialize`] does.
///
/// # Errors
/// The errors of `serializer`.
pub fn serialize_all<S: Serializer>(named: &[PathBuf], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(named.iter().map(|one| one.to_str().map_or_else(|| path(one).to_string(), str::to_owned)))
}

/// Serialises a path or its absence, as [`serialize`] does.
///
/// # Errors
/// The errors of `serializer`.
#[allow(clippy::ref_option, reason = "serde passes the field")]
pub fn serialize_option<S: Serializer>(named: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
    match named {
        Some(named) => serialize(named, serializer),
        None => serializer.serialize_none(),
    }
}

/// Returns whether a character controls a terminal or the order of adjacent characters.
#[must_use]
pub const fn is_control(character: char) -> bool {
    matches!(character, '\0'..='\x1f' | '\x7f'..='\u{9f}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for chunk in self.0.utf8_chunks() {
            for character in chunk.valid().chars() {
                if is_control(character) {
                    write!(f, "{}", character.escape_default())?;
                } else {
                    f.write_char(character)?;
                }
            }
            chunk.invalid().iter().try_for_each(|byte| write!(f, "\\x{byte:02x}"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;

    #[test]
    fn sizes_are_short() {
        let shown = [1, 4097, 512 << 10, 1536 << 20, 2 << 30, (2 << 30) + 1].map(bytes);
        assert_eq!(shown, ["1 bytes", "4097 bytes", "512 KiB", "1.5 GiB", "2 GiB", "2.00 GiB"]);
    }

    #[test]
    fn nothing_acts_and_nothing_is_lost() {
        let shown = |bytes: &[u8]| path(Path::new(OsStr::from_bytes(bytes))).to_string();
        assert_eq!(shown("/data/modèle 1.pt".as_bytes()), "/data/modèle 1.pt");
        assert_eq!(shown(b"a\x1b[2Jb\r\n\x7f\t"), r"a\u{1b}[2Jb\r\n\u{7f}\t");
        assert_eq!(shown(b"\xff\xfe.pt"), r"\xff\xfe.pt");
        assert_ne!(shown(b"\xff"), shown(b"\xfe"));
        // A byte of a control sequence in Latin-1, its UTF-8, and characters that reverse text.
        assert_eq!(shown(b"\x9b2J"), r"\x9b2J");
        assert_eq!(text("\u{9b}2J \u{202e}tp.a\u{2069}\u{2028}").to_string(), r"\u{9b}2J \u{202e}tp.a\u{2069}\u{2028}");
    }
}
