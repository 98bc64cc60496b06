//! The environment of a command, and its result.

use std::io::Write;
use std::path::PathBuf;

use deepnvme_perf::bench::Launcher;
use deepnvme_perf::{Error, Result};

/// The environment of a command.
pub struct Session<'a> {
    /// Standard output, for results.
    pub stdout: &'a mut (dyn Write + Send),
    /// Standard error, for messages.
    pub stderr: &'a mut (dyn Write + Send),
    /// Returns whether the user has asked to stop.
    pub interrupted: &'a (dyn Fn() -> bool + Sync),
    /// The command line that starts this program again, for benchmark processes.
    pub launcher: Launcher,
    /// The Python interpreter: the caller's, or `python3`. `report` lists its packages.
    pub python: PathBuf,
}

/// The version of deepnvme, as results state it.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The result of a command, as JSON and as text.
pub struct CommandResult {
    /// The result as JSON.
    pub json: String,
    /// The result as lines of text.
    pub text: String,
    /// Whether the user asked for JSON.
    pub(super) wants_json: bool,
    /// Whether the command was interrupted: this is the result so far; exit status 1.
    pub(super) is_interrupted: bool,
    /// The failure that the result describes, in short; exit status 1.
    pub(super) failure: Option<String>,
}

impl CommandResult {
    pub(super) fn new(value: &impl serde::Serialize, text: String, wants_json: bool) -> Result<Self> {
        let json = serde_json::to_string_pretty(value).map_err(|error| Error::failed(error.to_string()))?;
        Ok(Self { json, text, wants_json, is_interrupted: false, failure: None })
    }
}

/// Converts an error of standard output. A broken pipe is not a failure, but a full disk is.
#[allow(clippy::needless_pass_by_value, reason = "map_err passes a value")]
pub(super) fn output_error(error: std::io::Error) -> Error {
    if error.kind() == std::io::ErrorKind::BrokenPipe {
        return Error::OutputClosed;
    }
    Error::failed(format!("cannot write to standard output: {error}"))
}

/// Writes text to standard output.
pub(super) fn print(session: &mut Session<'_>, text: &str) -> Result<()> {
    session.stdout.write_all(text.as_bytes()).map_err(output_error)
}
