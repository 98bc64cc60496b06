//! Commands that run in Python, since they need torch.

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
        Command::Rows(options) => options.command.for_python(),
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::python_command;

    fn parsed(arguments: &str) -> Option<(&'static str, Value)> {
        let (name, options) = python_command(arguments.split(' '))?;
        Some((name, serde_json::from_str(&options).unwrap()))
    }

    #[test]
    fn python_gets_the_options_of_rows() {
        let (name, options) =
            parsed("deepnvme rows bench a --rows 1,2 --against fio,mmap --zipf 1 --tensor t --tensor u").unwrap();
        let table = json!({
            "source": "a", "tensor": ["t", "u"], "scales": [], "shape": [], "dtype": null, "offset": null, "json": false,
            "memory": "64MB", "rows": [1, 2], "zipf": 1.0, "rounds": 5, "against": ["fio", "mmap"],
        });
        assert_eq!((name, options), ("rows bench", table));
        let (name, options) = parsed("deepnvme rows pack a b --shape 9,3 --dtype float8_e4m3fn --offset 7").unwrap();
        assert_eq!((name, &options["target"], &options["shape"]), ("rows pack", &json!("b"), &json!([9, 3])));
        assert_eq!((&options["dtype"], &options["offset"]), (&json!("float8_e4m3fn"), &json!(7)));
        let (name, options) = parsed("deepnvme rows inspect a --shape 9,3 --dtype bf16 --json").unwrap();
        assert_eq!((name, &options["dtype"], &options["json"]), ("rows inspect", &json!("bfloat16"), &json!(true)));
    }

    #[test]
    fn mistakes_stay_in_rust() {
        assert_eq!(parsed("deepnvme rows inspect a --shape 9,3 --dtype fp8"), None);
        assert_eq!(parsed("deepnvme rows pack a b"), None);
        assert_eq!(parsed("deepnvme report a"), None);
    }
}
