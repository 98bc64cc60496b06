//! The file list of a checkpoint in several files: a JSON text with the fingerprints of the files and its own checksum.
//!
//! ```text
//! "deepnvme.checksum": "<bytes of the text>-<sum of these digits>-<sum of the text without these last digits>"
//! "deepnvme.files": { "<name>": { "bytes": 4100, "index_crc64": "<sum of the file's index>" } }
//! ```
//! Both are in the `metadata` of a Hugging Face index, and at the top level of `deepnvme.json`. The manifests of
//! checkpoint folders and of stripe sets have the checksum only.
//!
//! ```text
//! "deepnvme.replaces": { "bytes": 4100, "modified_ns": 1700000000000000000 }
//! ```
//! With this entry an index states that it is newer than the single file of the same name, which was not removed.

use std::ops::Range;

use serde::Deserialize;

use crate::checksums::{HEX_DIGITS, covered_sum, hex, parse_digits};
use crate::error::{Error, Result};
use crate::json::Object;

/// The key of the checksum.
pub const CHECKSUM_KEY: &str = "deepnvme.checksum";
/// The key of the files.
pub const FILES_KEY: &str = "deepnvme.files";
/// The key of the single file that an index replaces.
pub const REPLACES_KEY: &str = "deepnvme.replaces";
/// The digits of the checksum before it is written.
pub const BLANK: &str = "0000000000000000-0000000000000000-0000000000000000";

/// Length and index checksum of a listed file, which tell it from every other version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileFingerprint {
    /// Length of the file in bytes.
    pub bytes: u64,
    /// CRC-64/NVME of its index.
    pub index_crc64: u64,
}

/// The single file that an index replaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Replaced {
    /// Length of the file in bytes.
    pub bytes: u64,
    /// Modification time in nanoseconds since 1970.
    pub modified_ns: i64,
}

/// Whether a list has a checksum of its own text, and matches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SealState {
    /// The text is unchanged.
    Sealed,
    /// The text was damaged, or edited by another program.
    Damaged,
    /// The text has no checksum.
    Unsealed,
}

/// Returns the positions of the checksum's three numbers.
fn digit_ranges(text: &[u8]) -> Option<[Range<usize>; 3]> {
    let key = format!("\"{CHECKSUM_KEY}\": \"");
    let start = text.windows(key.len()).position(|window| window == key.as_bytes())? + key.len();
    let place = |index: usize| start + index * (HEX_DIGITS + 1)..start + index * (HEX_DIGITS + 1) + HEX_DIGITS;
    (start + BLANK.len() < text.len()).then(|| [place(0), place(1), place(2)])
}

/// Writes the checksum of a text over its [`BLANK`].
///
/// # Errors
/// `Invalid` if there is no blank.
pub fn write_checksum(text: &str) -> Result<String> {
    let mut bytes = text.as_bytes().to_vec();
    let blank = digit_ranges(&bytes).filter(|[first, .., last]| bytes[first.start..last.end] == *BLANK.as_bytes());
    let Some([length, length_sum, sum]) = blank else {
        return Err(Error::invalid(format!("the text has no blank {CHECKSUM_KEY:?}")));
    };
    write_digits(&mut bytes, length.clone(), text.len() as u64);
    let digits_sum = covered_sum(&bytes[length], &[]);
    write_digits(&mut bytes, length_sum, digits_sum);
    let whole = covered_sum(&bytes, std::slice::from_ref(&sum));
    write_digits(&mut bytes, sum, whole);
    String::from_utf8(bytes).map_err(|_| Error::invalid("the text is not UTF-8"))
}

fn write_digits(bytes: &mut [u8], place: Range<usize>, number: u64) {
    for (byte, digit) in bytes[place].iter_mut().zip(hex(number)) {
        *byte = digit as u8;
    }
}

/// Checks a text against its checksum.
#[must_use]
pub fn seal_state(text: &[u8]) -> SealState {
    let Some([length, length_sum, sum]) = digit_ranges(text) else {
        // A damaged key leaves the other one.
        let is_there = |key: &str| text.windows(key.len()).any(|window| window == key.as_bytes());
        return if is_there(CHECKSUM_KEY) || is_there(FILES_KEY) { SealState::Damaged } else { SealState::Unsealed };
    };
    let is_as_long = parse_digits(text, length.clone()) == Some(text.len() as u64);
    let is_length = parse_digits(text, length_sum) == Some(covered_sum(&text[length], &[]));
    let whole = covered_sum(text, std::slice::from_ref(&sum));
    if is_as_long && is_length && parse_digits(text, sum) == Some(whole) {
        SealState::Sealed
    } else {
        SealState::Damaged
    }
}

#[derive(Deserialize)]
struct Wire {
    #[serde(rename = "deepnvme.files", default)]
    files: Option<Object<WireFingerprint>>,
    #[serde(default)]
    metadata: Option<Metadata>,
}

#[derive(Deserialize)]
struct Metadata {
    #[serde(rename = "deepnvme.files", default)]
    files: Option<Object<WireFingerprint>>,
    #[serde(rename = "deepnvme.replaces", default)]
    replaces: Option<Replaced>,
}

#[derive(Deserialize)]
struct WireFingerprint {
    bytes: u64,
    index_crc64: String,
}

/// Parses the files of a list. A list without files has none.
///
/// # Errors
/// `Corrupt` for a text that is not a list, and for files outside its folder.
pub fn files(text: &[u8]) -> Result<Vec<(String, FileFingerprint)>> {
    let corrupt = |what: String| Error::corrupt(0, format!("this is not a file list: {what}"));
    // serde also reads a struct from an array.
    if !text.trim_ascii_start().starts_with(b"{") {
        return Err(corrupt("it is not a JSON object".into()));
    }
    let wire: Wire = serde_json::from_slice(text).map_err(|error| corrupt(error.to_string()))?;
    let files = wire.files.or_else(|| wire.metadata?.files);
    let file = |(name, WireFingerprint { bytes, index_crc64 }): (String, WireFingerprint)| {
        let index_crc64 =
            parse_digits(index_crc64.as_bytes(), 0..HEX_DIGITS).filter(|_| index_crc64.len() == HEX_DIGITS);
        match index_crc64 {
            Some(index_crc64) if is_file_name(&name) => Ok((name, FileFingerprint { bytes, index_crc64 })),
            _ => Err(corrupt(format!("{name:?} is not a file name in this folder"))),
        }
    };
    files.map_or_else(Vec::new, |files| files.0).into_iter().map(file).collect()
}

/// Returns the file that an index replaces, if the index states one and its checksum is valid.
#[must_use]
pub fn replaces(text: &[u8]) -> Option<Replaced> {
    let wire: Wire = (seal_state(text) == SealState::Sealed).then(|| serde_json::from_slice(text).ok())??;
    wire.metadata?.replaces
}

/// Whether a name is a file name without a folder.
pub(crate) fn is_file_name(name: &str) -> bool {
    !name.is_empty() && !name.contains(['/', '\0']) && name != "." && name != ".."
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text() -> String {
        let text = format!(
            "{{\n  \"metadata\": {{\n    \"{CHECKSUM_KEY}\": \"{BLANK}\",\n    \"{FILES_KEY}\": {{\"a.safetensors\": \
             {{\"bytes\": 5, \"index_crc64\": \"00000000000000ff\"}}}}\n  }},\n  \"weight_map\": {{\"{CHECKSUM_KEY}\": \
             \"a.safetensors\"}}\n}}\n"
        );
        write_checksum(&text).unwrap()
    }

    #[test]
    fn every_changed_byte_is_reported() {
        let text = text().into_bytes();
        assert_eq!(seal_state(&text), SealState::Sealed);
        assert_eq!(files(&text).unwrap(), [("a.safetensors".into(), FileFingerprint { bytes: 5, index_crc64: 255 })]);
        for at in 0..text.len() {
            for value in (0..=u8::MAX).filter(|value| *value != text[at]) {
                let mut damaged = text.clone();
                damaged[at] = value;
                assert_eq!(seal_state(&damaged), SealState::Damaged, "byte {at} as {value}");
            }
        }
    }

    #[test]
    fn every_byte_more_or_less_is_reported() {
        let text = text().into_bytes();
        for at in 0..=text.len() {
            let (before, after) = text.split_at(at);
            for value in 0..=u8::MAX {
                let more = [before, &[value], after].concat();
                assert_eq!(seal_state(&more), SealState::Damaged, "{value} put in at {at}");
            }
            for count in 1..=after.len() {
                let less = [before, &after[count..]].concat();
                // Without either key a text is one that never had a checksum.
                assert_ne!(seal_state(&less), SealState::Sealed, "{count} bytes less at {at}");
                if count < 30 {
                    assert_eq!(seal_state(&less), SealState::Damaged, "{count} bytes less at {at}");
                }
            }
        }
    }

    #[test]
    fn a_sum_in_another_text_is_damage() {
        let copied = text().replace("\"a.safetensors\"}\n", "\"another.safetensors\"}\n");
        assert_eq!(seal_state(copied.as_bytes()), SealState::Damaged);
        assert_eq!(seal_state(b"{\"weight_map\": {}}"), SealState::Unsealed);
        assert!(write_checksum("{}").is_err() && write_checksum(&text()).is_err());
    }

    #[test]
    fn only_a_sound_index_says_that_it_replaces_a_file() {
        let said = |metadata: &str| {
            let blank =
                format!("{{\"metadata\": {{\"{CHECKSUM_KEY}\": \"{BLANK}\"{metadata}}}, \"weight_map\": {{}}}}\n");
            write_checksum(&blank).unwrap()
        };
        let text = said(", \"deepnvme.replaces\": {\"bytes\": 4100, \"modified_ns\": 1700000000000000001}");
        let expected = Replaced { bytes: 4100, modified_ns: 1_700_000_000_000_000_001 };
        assert_eq!(replaces(text.as_bytes()), Some(expected));
        assert_eq!(replaces(text.replace("4100", "4101").as_bytes()), None);
        assert_eq!(replaces(said("").as_bytes()), None);
        assert_eq!(replaces(said(", \"deepnvme.replaces\": 5").as_bytes()), None);
        assert_eq!(replaces(b"{\"metadata\": {\"deepnvme.replaces\": {\"bytes\": 1, \"modified_ns\": 2}}}"), None);
    }

    #[test]
    fn lists_name_files_of_their_own_folder() {
        for text in [
            "[]",
            r#"{"deepnvme.files": {"../a": {"bytes": 1, "index_crc64": "0000000000000000"}}}"#,
            r#"{"deepnvme.files": {"a": {"bytes": 1, "index_crc64": "00000000000000000"}}}"#,
            r#"{"deepnvme.files": {"a": {"bytes": -1, "index_crc64": "0000000000000000"}}}"#,
        ] {
            assert!(matches!(files(text.as_bytes()), Err(Error::Corrupt { .. })), "{text}");
        }
        assert_eq!(files(b"{}").unwrap(), []);
    }
}
