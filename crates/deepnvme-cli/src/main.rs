//! The command `deepnvme`: everything is in `deepnvme_cli::commands`; this file gives it the process.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use deepnvme_cli::Launcher;
use deepnvme_cli::commands::{Output, Session, keep_numbers, run};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

fn main() -> ExitCode {
    keep_numbers();
    // Ctrl-C, SIGTERM and SIGHUP: the command removes its files and ends. Without a handler they end it at once.
    let _ = ctrlc::set_handler(|| INTERRUPTED.store(true, Ordering::SeqCst));
    let program = std::env::current_exe().unwrap_or_else(|_| "deepnvme".into());
    let status = run(
        std::env::args_os(),
        &mut Session {
            output: &mut Output::new(),
            talk: &mut std::io::stderr(),
            interrupted: &|| INTERRUPTED.load(Ordering::SeqCst),
            launcher: Launcher { program, arguments: Vec::new() },
            python: "python3".into(),
        },
    );
    ExitCode::from(status)
}
