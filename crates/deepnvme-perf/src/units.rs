//! Parsing and printing sizes. Speeds are in GB/s, 10^9 bytes a second.

use deepnvme_io::size::{self, SIZE_FORMS};

pub use deepnvme_io::display::bytes as bytes_text;

/// Parses a size of the command line, by the rules of [`size::parse`].
///
/// # Errors
/// The text is not a size; the message has examples.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    size::parse(text).ok_or_else(|| format!("{text:?} is not a size; write {SIZE_FORMS}, or a number of bytes"))
}

/// Prints a size in the shortest form that [`parse_bytes`] reads: `512K`, `2G`, `4097`.
#[must_use]
pub fn bytes_option(bytes: u64) -> String {
    let fits = |shift: u32| bytes > 0 && bytes.is_multiple_of(1 << shift);
    [("T", 40), ("G", 30), ("M", 20), ("K", 10)]
        .iter()
        .find(|(_, shift)| fits(*shift))
        .map_or_else(|| bytes.to_string(), |(unit, shift)| format!("{}{unit}", bytes >> shift))
}

/// Converts bytes to units of 10^9.
#[must_use]
pub fn gb(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn errors_have_examples() {
        assert_eq!(parse_bytes("2GB"), Ok(2_000_000_000));
        let message = parse_bytes("12Q").unwrap_err();
        assert!(
            message.contains("12Q") && ["4GB", "512MiB", "64K"].iter().all(|form| message.contains(form)),
            "{message}"
        );
    }

    #[test]
    fn sizes_are_printed_short() {
        assert_eq!([0, 512 << 10, 1536 << 20, 2 << 30].map(bytes_option), ["0", "512K", "1536M", "2G"]);
    }

    proptest! {
        #[test]
        fn printed_sizes_parse_to_the_same_value(bytes in 0_u64..1 << 50) {
            prop_assert_eq!(parse_bytes(&bytes_option(bytes)), Ok(bytes));
        }
    }
}
