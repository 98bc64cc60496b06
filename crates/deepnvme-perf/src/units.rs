//! Parsing and printing sizes. Suffixes are powers of 1024, as in fio and DeepSpeed; speeds are in GB/s, 10^9 bytes a second.

pub use deepnvme_io::display::bytes as bytes_text;

/// Parses a size: `4096`, `512K`, `8M`, `2G`, `1T`, also `512KiB`, `8MB`, in either case.
///
/// # Errors
/// The text is not a size; the message has examples.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let trimmed = text.trim();
    let digits = trimmed.len() - trimmed.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, suffix) = trimmed.split_at(digits);
    let power = match suffix.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 1,
        "m" | "mb" | "mib" => 2,
        "g" | "gb" | "gib" => 3,
        "t" | "tb" | "tib" => 4,
        _ => return Err(format!("{text:?} is not a size; write for example 4096, 512K, 8M or 2G")),
    };
    let number: u64 =
        number.parse().map_err(|_| format!("{text:?} is not a size; write for example 4096, 512K, 8M or 2G"))?;
    number.checked_mul(1 << (10 * power)).ok_or_else(|| format!("{text:?} is larger than any file"))
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
    fn sizes_are_parsed() {
        for (text, bytes) in
            [("4096", 4096), ("512K", 512 << 10), ("8m", 8 << 20), ("2GiB", 2 << 30), (" 1 TB ", 1 << 40)]
        {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "K", "-1", "1.5G", "12Q", "99999999T", "0x10"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
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
