//! What all commands share: the session that they are given, and the answer that they give.

use std::io::Write;
use std::path::PathBuf;

use deepnvme_perf::bench::Launcher;
use deepnvme_perf::{Error, Result};

/// Where a command writes, and who may stop it.
pub struct Session<'a> {
    /// Data.
    pub output: &'a mut (dyn Write + Send),
    /// Talk: progress and errors.
    pub talk: &'a mut (dyn Write + Send),
    /// Whether somebody asked to stop.
    pub interrupted: &'a (dyn Fn() -> bool + Sync),
    /// How to start this program again, for several processes.
    pub launcher: Launcher,
    /// The Python that a report asks for its packages: the caller, or the first `python3`.
    pub python: PathBuf,
}

/// What a command found out: for machines, for people, and which of the two was asked for.
pub struct Answer {
    /// JSON.
    pub json: String,
    /// Lines to read.
    pub text: String,
    pub(super) wants_json: bool,
    /// Whether somebody stopped it: what is there is printed, and the exit status tells.
    pub(super) is_cut_short: bool,
    /// What the exit status tells, too.
    pub(super) bad_news: Option<String>,
}

impl Answer {
    pub(super) fn of(value: &impl serde::Serialize, text: String, wants_json: bool) -> Result<Self> {
        let json = serde_json::to_string_pretty(value).map_err(|error| Error::failed(error.to_string()))?;
        Ok(Self { json, text, wants_json, is_cut_short: false, bad_news: None })
    }
}

/// A reader that has gone is no failure; a full disk behind standard output is one.
#[allow(clippy::needless_pass_by_value, reason = "it is what map_err gives")]
pub(super) fn closed(error: std::io::Error) -> Error {
    if error.kind() == std::io::ErrorKind::BrokenPipe {
        return Error::Closed;
    }
    Error::failed(format!("cannot write to standard output: {error}"))
}

/// Writes data, as text.
pub(super) fn print(session: &mut Session<'_>, text: &str) -> Result<()> {
    session.output.write_all(text.as_bytes()).map_err(closed)
}
