//! Facts about the system and this process, most of them from `/proc` and `/sys`. The simulation does not replace them.

use std::fs;
use std::path::Path;

/// Returns the text of a file in `/proc` or `/sys`, or `None` if it is missing or not readable.
pub fn system_text(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// Returns the user that owns the files this process creates.
#[must_use]
pub fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Returns the process's umask, without changing it. Returns the usual 022 if `/proc` does not show it.
#[must_use]
pub fn umask() -> u32 {
    let status = system_text("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    line.and_then(|text| u32::from_str_radix(text.trim(), 8).ok()).unwrap_or(0o022)
}
