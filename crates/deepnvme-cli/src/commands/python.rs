//! Commands that need models, and so Python: what may be typed stands in `cli` with the rest, what it does in the package.

use std::ffi::OsString;
use std::process::Command as Process;

use clap::Parser;
use deepnvme_io::shown;
use deepnvme_perf::{Error, Result};

use super::session::Session;
use crate::arguments::{Cli, Command};

/// The name of a command that Python runs, and its options as JSON; `None` for all others and for what is no command, which
/// [`run`](super::run) explains.
#[must_use]
pub fn for_python(arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> Option<(&'static str, String)> {
    let command = Cli::try_parse_from(arguments).ok()?.command;
    let (name, options) = match &command {
        Command::Generate(options) => ("generate", serde_json::to_string(options)),
        Command::StreamBench(options) => ("stream-bench", serde_json::to_string(options)),
        _ => return None,
    };
    Some((name, options.ok()?))
}

/// Has Python run the command that was typed: the program without Python around it is asked for it here.
pub(super) fn run(arguments: &[OsString], session: &Session<'_>) -> Result<()> {
    let probed = Process::new(&session.python).args(["-c", "import deepnvme"]).output();
    if !probed.is_ok_and(|probed| probed.status.success()) {
        return Err(Error::failed(format!(
            "this command needs Python's package: {} -m pip install deepnvme transformers torch",
            shown::path(&session.python)
        )));
    }
    let status = Process::new(&session.python).args(["-m", "deepnvme"]).args(arguments).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        // It has said itself what was wrong.
        Ok(_) => Err(Error::CutShort),
        Err(error) => Err(Error::failed(format!("{}: {error}", shown::path(&session.python)))),
    }
}
