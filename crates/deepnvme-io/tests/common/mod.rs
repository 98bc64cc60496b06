//! What the integration tests of the engine share: backends by name, and a visible way to skip.
#![allow(dead_code, reason = "every test binary uses its own part")]
#![allow(clippy::expect_used, clippy::panic, clippy::print_stdout, reason = "these are tests")]

use deepnvme_io::SubmitMode;
use deepnvme_io::backend::{self, Backend, BackendKind, BackendSetup};

/// The backends that move bytes for users.
pub(crate) const REAL_BACKENDS: [BackendKind; 3] = [BackendKind::Uring, BackendKind::Aio, BackendKind::Threads];

/// A constructor of backends.
pub(crate) type MakeBackend = Box<dyn Fn(&BackendSetup) -> Box<dyn Backend> + Send + Sync>;

/// Says that something was not tested, and why; `cargo test -- --nocapture` shows it.
pub(crate) fn skipped(why: &str) {
    println!("skipped: {why}");
}

/// Why a real backend does not work on this machine, if it does not.
pub(crate) fn unavailable(kind: BackendKind) -> Option<String> {
    let setup = BackendSetup { queue_depth: 1, submit: SubmitMode::Batch, worker_index: 0 };
    backend::open(kind, &setup).err().map(|error| error.to_string())
}

/// The constructor of a real backend, or `None` after saying why it does not work here.
pub(crate) fn real(kind: BackendKind) -> Option<MakeBackend> {
    if let Some(reason) = unavailable(kind) {
        skipped(&format!("{} does not work here: {reason}", kind.name()));
        return None;
    }
    Some(Box::new(move |setup| backend::open(kind, setup).expect("it has just worked")))
}
