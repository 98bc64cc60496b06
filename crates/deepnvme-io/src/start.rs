//! Starts threads, and explains why one cannot be started.

use std::io;

use crate::error::{Error, Result};
use crate::op::Errno;

const REMEDY: &str = "raise the limit on threads (`ulimit -u`, or `pids.max` of the container) or on memory (`ulimit -v`), \
                      or lower `workers`";

/// Starts a thread with the `Builder` that `spawn` calls, scoped or not. A failure is an error, not a panic or an
/// abort.
///
/// # Errors
/// The kernel's error, usually `EAGAIN` or `ENOMEM`, with the remedy.
pub fn start_thread<T>(spawn: impl FnOnce() -> io::Result<T>) -> Result<T> {
    deepnvme_mem::check_thread_memory(1).and_then(|()| spawn()).map_err(|error| {
        let errno = Errno::from_io_error(&error).unwrap_or(Errno::AGAIN);
        Error::os("start a thread", errno).because(REMEDY)
    })
}

#[cfg(all(test, not(loom), not(simulated)))]
mod tests {
    use super::*;

    #[test]
    fn no_thread_is_an_error_with_a_remedy() {
        assert_eq!(start_thread(|| Ok(5)).unwrap(), 5);
        for errno in [Errno::AGAIN, Errno::NOMEM] {
            let refused = start_thread::<()>(|| Err(errno.into())).unwrap_err();
            assert_eq!(refused.errno(), Some(errno.raw_os_error()));
            assert!(refused.detail().contains("ulimit -u") && refused.detail().contains("ulimit -v"), "{refused}");
        }
        assert!(deepnvme_mem::check_thread_memory(usize::MAX).is_err());
        assert!(deepnvme_mem::check_thread_memory(usize::MAX >> 22).is_err());
    }
}
