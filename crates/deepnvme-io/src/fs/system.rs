//! What the running system says of itself in `/proc` and `/sys`. It is never simulated.

use std::fs;
use std::path::Path;

/// The text of a file in `/proc` or `/sys`; `None` where there is none, or it may not be read.
pub fn system_text(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// The user whose files this process makes.
#[must_use]
pub fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The process's umask, without changing it.
#[must_use]
pub fn umask() -> u32 {
    let status = system_text("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    line.and_then(|text| u32::from_str_radix(text.trim(), 8).ok()).unwrap_or(0o022)
}
