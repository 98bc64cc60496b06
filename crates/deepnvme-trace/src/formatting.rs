//! Formats times, bytes and counts for people. This module does no I/O.

/// Rounds up to 1, 2 or 5 times a power of ten, with a tolerance of a thousandth.
pub(crate) fn nice_step(least: f64) -> f64 {
    let power = 10_f64.powf(least.max(1e-9).log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|step| *step >= least * 0.999).unwrap_or(power)
}

/// Formats nanoseconds in a unit that fits them and the `step` between ticks.
pub(crate) fn time_text(ns: f64, step: f64) -> String {
    let (unit, size) = match ns.max(step) {
        longest if longest >= 1e9 => ("s", 1e9),
        longest if longest >= 1e6 => ("ms", 1e6),
        longest if longest >= 1e3 => ("µs", 1e3),
        _ => ("ns", 1.0),
    };
    format!("{} {unit}", number(ns / size))
}

/// Formats `1 request`, `2 requests`.
pub(crate) fn counted(count: u64, noun: &str) -> String {
    match (count, noun.strip_suffix('y')) {
        (1, _) => format!("1 {noun}"),
        (_, Some(stem)) => format!("{count} {stem}ies"),
        _ => format!("{count} {noun}s"),
    }
}

/// Formats bytes in a decimal unit.
pub(crate) fn amount(bytes: u64) -> String {
    let (unit, size) = match bytes {
        1_000_000_000.. => ("GB", 1e9),
        1_000_000.. => ("MB", 1e6),
        _ => ("kB", 1e3),
    };
    format!("{} {unit}", number(bytes as f64 / size))
}

/// Formats a number with at most two decimals, and about three digits below 1000, without trailing zeros.
pub(crate) fn number(value: f64) -> String {
    let digits = if value >= 100.0 {
        0
    } else if value >= 10.0 {
        1
    } else {
        2
    };
    let text = format!("{value:.digits$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// Escapes text for HTML and SVG.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!([0.0, 0.5, 7.25, 12.34, 999.9].map(number), ["0", "0.5", "7.25", "12.3", "1000"]);
        assert_eq!([0.0, 1.5e3, 2.5e6, 3e9].map(|ns| time_text(ns, 0.0)), ["0 ns", "1.5 µs", "2.5 ms", "3 s"]);
        assert_eq!([0, 655_360, 315_000_000, 1_073_741_824].map(amount), ["0 kB", "655 kB", "315 MB", "1.07 GB"]);
        assert_eq!(
            [(1, "copy"), (2, "copy"), (0, "span")].map(|(n, of)| counted(n, of)),
            ["1 copy", "2 copies", "0 spans"]
        );
        assert_eq!([0.7, 1.0, 1.2, 3.0, 7.0].map(nice_step), [1.0, 1.0, 2.0, 5.0, 10.0]);
    }
}
