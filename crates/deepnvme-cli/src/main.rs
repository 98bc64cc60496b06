//! The binary `deepnvme`: connects `deepnvme_cli::commands` to the process and its signals.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use deepnvme_cli::commands::{Session, run};
use deepnvme_cli::{CheckedStdout, Launcher, reserve_standard_streams};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

fn main() -> ExitCode {
    reserve_standard_streams();
    // Ctrl-C, SIGTERM and SIGHUP: the command removes its files and ends. If no handler can be set, they kill it.
    let _ = ctrlc::set_handler(|| INTERRUPTED.store(true, Ordering::SeqCst));
    let program = std::env::current_exe().unwrap_or_else(|_| "deepnvme".into());
    let status = run(
        std::env::args_os(),
        &mut Session {
            stdout: &mut CheckedStdout::new(),
            stderr: &mut std::io::stderr(),
            interrupted: &|| INTERRUPTED.load(Ordering::SeqCst),
            launcher: Launcher { program, arguments: Vec::new() },
            python: "python3".into(),
        },
    );
    ExitCode::from(status)
}
