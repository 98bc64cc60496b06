//! Parses sizes as users write them. All sizes of the command line and of Python are parsed here.
//!
//! `4GB` is 4 x 10^9 bytes and `4GiB` is 4 x 2^30, as everywhere. A bare letter (`4G`) is binary, as in fio and dd.

/// Maximum bytes of a file or of memory.
pub const SIZE_MAX: u64 = i64::MAX as u64;
/// The accepted forms, for messages.
pub const SIZE_FORMS: &str = "a size such as '4GB' (4 x 10^9 bytes), '512MiB' (512 x 2^20) or '64K' (64 x 2^10)";
/// Letters of units, in ascending powers from 1 on.
const LETTERS: &str = "kmgtp";
/// Maximum digits after the point, so that the computation fits 128 bits.
const FRACTION_DIGITS_MAX: usize = 18;

/// Parses a size: `4096`, `64K`, `1.5GB`, `512 MiB`, in either case. Parts of a byte are dropped.
///
/// Returns `None` if the text has another form, or is larger than any file.
#[must_use]
pub fn parse(text: &str) -> Option<u64> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit_bytes = u128::from(unit_bytes(unit)?);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    // `parse` refuses an empty text, and a second point.
    if fraction.len() > FRACTION_DIGITS_MAX {
        return None;
    }
    let whole = u128::from(whole.parse::<u64>().ok()?) * unit_bytes;
    let part = u128::from(fraction.parse::<u64>().ok()?) * unit_bytes / 10_u128.pow(fraction.len() as u32);
    u64::try_from(whole + part).ok().filter(|bytes| *bytes <= SIZE_MAX)
}

fn unit_bytes(unit: &str) -> Option<u64> {
    let unit = unit.trim_start().to_ascii_lowercase();
    let Some(power) = unit.chars().next().and_then(|letter| LETTERS.find(letter)) else {
        return ["", "b"].contains(&unit.as_str()).then_some(1);
    };
    let base: u64 = match &unit[1..] {
        "" | "i" | "ib" => 1024,
        "b" => 1000,
        _ => return None,
    };
    Some(base.pow(power as u32 + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_have_their_standard_sizes() {
        for (text, bytes) in [
            ("4096", 4096),
            ("12 B", 12),
            (" 8m ", 8 << 20),
            ("1.5G", 3 << 29),
            ("1.2GB", 1_200_000_000),
            ("0.1", 0),
            ("9223372036854775807", SIZE_MAX),
        ] {
            assert_eq!(parse(text), Some(bytes), "{text}");
        }
        for (power, letter) in (1..).zip(LETTERS.chars()) {
            let (binary, decimal) = (Some(3 * 1024_u64.pow(power)), Some(3 * 1000_u64.pow(power)));
            let upper = letter.to_ascii_uppercase();
            for text in [format!("3{upper}"), format!("3{letter}i"), format!("3{upper}iB"), format!("3 {upper}iB")] {
                assert_eq!(parse(&text), binary, "{text}");
            }
            for text in [format!("3{upper}B"), format!("3{letter}b"), format!("3 {upper}B")] {
                assert_eq!(parse(&text), decimal, "{text}");
            }
        }
    }

    #[test]
    fn other_forms_are_refused() {
        for text in ["", "K", "-1", "+1", "12Q", "0x10", "1e9", "1.G", ".5G", "1.2.3G", "1.+5G", "nan", "four", "1_000"]
        {
            assert_eq!(parse(text), None, "{text}");
        }
        for text in ["4 GBit", "4G B", "4BK", "\u{663}G", "4\u{212a}", "0.0000000000000000001G"] {
            assert_eq!(parse(text), None, "{text}");
        }
        for text in ["9223372036854775808", "8192P", "9999999TB", "99999999999999999999"] {
            assert_eq!(parse(text), None, "{text} is larger than any file");
        }
    }
}
