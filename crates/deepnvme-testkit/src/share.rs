//! Fewer cases where each takes much longer, as under valgrind.

/// The environment variable that says how many times fewer cases a test runs.
pub const VARIABLE: &str = "DEEPNVME_TEST_CASES_DIVISOR";

/// Returns `count`, or a share of it if [`VARIABLE`] is set, and at least one.
///
/// # Panics
/// If the variable is no positive number.
#[must_use]
pub fn fewer(count: u64) -> u64 {
    let divisor: u64 = match std::env::var(VARIABLE) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{VARIABLE} must be a number, not {text:?}")),
        Err(_) => 1,
    };
    assert!(divisor > 0, "{VARIABLE} must be at least 1");
    (count / divisor).max(1)
}
