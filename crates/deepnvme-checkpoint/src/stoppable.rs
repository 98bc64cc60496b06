//! Work that looks at no request to stop: it is left to a thread of its own when one comes.

use crate::error::Result;
use crate::progress::Progress;

/// How often the request is looked for.
#[cfg(not(simulated))]
const LOOK: std::time::Duration = std::time::Duration::from_millis(20);

/// Runs `work`, which changes nothing, until it is done or somebody asks to stop. Then the thread ends by itself, and
/// what it found is dropped there.
///
/// # Errors
/// `Interrupted`, and what `work` fails with.
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
        match over.recv_timeout(LOOK) {
            Ok(done) => return done,
            Err(RecvTimeoutError::Timeout) => progress.check()?,
            Err(RecvTimeoutError::Disconnected) => {
                let text = "the thread that read the file has panicked";
                return Err(deepnvme_io::Error::new(deepnvme_io::ErrorKind::Io, "open", text).into());
            }
        }
    }
}

/// In a simulation nothing takes time.
///
/// # Errors
/// What `work` fails with.
#[cfg(simulated)]
pub fn until_stopped<T: Send + 'static>(
    progress: &Progress,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    progress.check()?;
    work()
}
