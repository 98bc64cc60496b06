//! Work that does not poll for interruption: a thread of its own runs it, and is abandoned on request.

use crate::error::Result;
use crate::progress::Progress;

/// How often to poll for a stop request.
#[cfg(not(simulated))]
const POLL_INTERVAL: std::time::Duration = std::time::Duration::from_millis(20);

/// Runs `work`, which changes nothing, until it is done or a stop is requested. An abandoned thread ends by itself and
/// drops its result.
///
/// # Errors
/// `Interrupted`, and the errors of `work`.
#[cfg(not(simulated))]
pub fn until_stopped<T: Send + 'static>(
    progress: &Progress,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    use std::sync::mpsc::{RecvTimeoutError, channel};

    let (report, over) = channel();
    let run = move || drop(report.send(work()));
    deepnvme_io::start_thread(|| std::thread::Builder::new().name("deepnvme-open".into()).spawn(run))?;
    loop {
        match over.recv_timeout(POLL_INTERVAL) {
            Ok(done) => return done,
            Err(RecvTimeoutError::Timeout) => progress.check()?,
            Err(RecvTimeoutError::Disconnected) => {
                let text = "the thread that read the file has panicked";
                return Err(deepnvme_io::Error::new(deepnvme_io::ErrorKind::Io, "open", text).into());
            }
        }
    }
}

/// In a simulation, work takes no time.
///
/// # Errors
/// `Interrupted` if a stop was requested before, and the errors of `work`.
#[cfg(simulated)]
pub fn until_stopped<T: Send + 'static>(
    progress: &Progress,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    progress.check()?;
    work()
}
