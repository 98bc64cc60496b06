//! The checksum of the header of a packed table: of all bytes before the first block.
//!
//! It is part of the header, as eight hexadecimal digits. They count as zeros.

use crate::checksum_list::checksum_of;

/// The key in the description, and all up to the digits. The description is a string of JSON inside JSON.
const MARK: &[u8] = br#"header_crc32c\":\""#;
/// The digits before they are known.
pub(crate) const PLACEHOLDER: &str = "00000000";

/// Writes the checksum into a header that has the placeholder. Returns whether the header has one place for it.
pub(crate) fn set(header: &mut [u8]) -> bool {
    let Some(at) = place(header) else { return false };
    let digits = format!("{:08x}", checksum_of(header));
    header[at..at + PLACEHOLDER.len()].copy_from_slice(digits.as_bytes());
    true
}

/// Returns whether the checksum of a header matches.
pub(crate) fn is_sound(header: &[u8]) -> bool {
    let Some(at) = place(header) else { return false };
    let mut without = header.to_vec();
    let digits = &mut without[at..at + PLACEHOLDER.len()];
    let stated = digits.to_vec();
    digits.copy_from_slice(PLACEHOLDER.as_bytes());
    format!("{:08x}", checksum_of(&without)).as_bytes() == stated
}

/// Returns whether these are the digits of a checksum.
pub(crate) fn are_digits(digits: &[u8]) -> bool {
    digits.len() == PLACEHOLDER.len() && digits.iter().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
}

/// Returns the offset of the digits. `None` unless there is exactly one place for them.
fn place(header: &[u8]) -> Option<usize> {
    // Spaces follow, perhaps many.
    let mut places = header.trim_ascii_end().windows(MARK.len()).enumerate().filter(|(_, window)| *window == MARK);
    let at = places.next()?.0 + MARK.len();
    let is_one = places.next().is_none();
    (is_one && header.get(at..at + PLACEHOLDER.len()).is_some_and(are_digits)).then_some(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_changed_byte_is_noticed() {
        let mut header =
            br#"{"__metadata__":{"deepnvme.rows":"{\"header_crc32c\":\"00000000\",\"rows\":3}"}}   "#.to_vec();
        assert!(set(&mut header) && is_sound(&header));
        for at in 0..header.len() {
            for bit in 0..8 {
                header[at] ^= 1 << bit;
                assert!(!is_sound(&header), "byte {at}, bit {bit}");
                header[at] ^= 1 << bit;
            }
        }
        let twice = [&header[..], &header].concat();
        assert!(!is_sound(&twice) && !is_sound(b"") && !set(&mut b"{}".to_vec()));
    }
}
