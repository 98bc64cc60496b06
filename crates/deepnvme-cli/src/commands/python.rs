//! Commands that run in Python, since they need models.

use std::ffi::OsString;
use std::process::Command as Process;

use clap::Parser;
use deepnvme_io::display;
use deepnvme_perf::{Error, Result};

use super::session::Session;
use crate::arguments::{Cli, Command};

/// Returns the name and the options, as JSON, of a command that Python runs. `None` for all other commands and for
/// invalid arguments; [`run`](super::run) reports those.
#[must_use]
pub fn python_command(
    arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>,
) -> Option<(&'static str, String)> {
    let command = Cli::try_parse_from(arguments).ok()?.command;
    let (name, options) = match &command {
        Command::Demo(options) => ("demo", serde_json::to_string(options)),
        Command::Generate(options) => ("generate", serde_json::to_string(options)),
        Command::StreamBench(options) => ("stream-bench", serde_json::to_string(options)),
        _ => return None,
    };
    Some((name, options.ok()?))
}

/// Runs the command in Python, for the binary.
pub(super) fn run(arguments: &[OsString], session: &Session<'_>) -> Result<()> {
    let probed = Process::new(&session.python).args(["-c", "import deepnvme"]).output();
    if !probed.is_ok_and(|probed| probed.status.success()) {
        return Err(Error::failed(format!(
            "this command needs the Python package: {} -m pip install deepnvme transformers torch",
            display::path(&session.python)
        )));
    }
    let status = Process::new(&session.python).args(["-m", "deepnvme"]).args(arguments).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(Error::Told(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))),
        Err(error) => Err(Error::failed(format!("{}: {error}", display::path(&session.python)))),
    }
}
