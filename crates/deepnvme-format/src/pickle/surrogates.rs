//! Strings with lone surrogates, which Python uses for file names that are not UTF-8.
//!
//! In a pickle each surrogate takes three bytes of UTF-8, which Rust strings do not allow.

use std::fmt::Write as _;

/// Whether the bytes are UTF-8 except for surrogates.
pub(super) fn are_text(bytes: &[u8]) -> bool {
    let mut rest = bytes;
    while let Err(error) = std::str::from_utf8(rest) {
        match &rest[error.valid_up_to()..] {
            [0xed, 0xa0..=0xbf, 0x80..=0xbf, tail @ ..] => rest = tail,
            _ => return false,
        }
    }
    true
}

/// Returns the text with each surrogate as an escape such as `\udc80`, as Python's error handler `backslashreplace`
/// writes it.
pub(super) fn escaped(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    let mut rest = bytes;
    loop {
        match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                return text;
            }
            Err(error) => {
                let (valid, tail) = rest.split_at(error.valid_up_to());
                text.push_str(std::str::from_utf8(valid).unwrap_or_default());
                // `are_text` checked that only surrogates are invalid.
                let [0xed, middle, last, tail @ ..] = tail else { return text };
                let unit = 0xd000 | u32::from(middle & 0x3f) << 6 | u32::from(last & 0x3f);
                let _ = write!(text, "\\u{unit:04x}");
                rest = tail;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn surrogates_are_text_and_other_bytes_are_not() {
        for (bytes, expected) in [
            (&b"plain"[..], Some("plain")),
            (b"a\xed\xb3\xbfb", Some("a\\udcffb")),
            (b"\xed\xa0\x80\xed\xb0\x80", Some("\\ud800\\udc00")),
            (b"\xc3\xa4\xed\xaf\xbf", Some("\u{e4}\\udbff")),
            (b"\xff", None),
            (b"\xed\xa0", None),
            (b"\xed\xa0\x80\xff", None),
            (b"\xc0\x80", None),
        ] {
            assert_eq!(are_text(bytes), expected.is_some(), "{bytes:?}");
            if let Some(expected) = expected {
                assert_eq!(escaped(bytes), expected);
            }
        }
    }
}
