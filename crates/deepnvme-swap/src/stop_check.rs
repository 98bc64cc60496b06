//! Ends transfers that a caller waits for, once the caller gives up or the swapper is closed.

use std::time::Duration;

use deepnvme_io::{Error as IoError, ErrorKind, Transfer, TransferMemory, Transferred};

use crate::error::{Error, Result};
use crate::io_scheduler::IoScheduler;
use crate::options::CancelCheck;

/// Interval between checks during a transfer.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// Whether a call that moves bytes has to stop.
pub(crate) struct StopCheck<'a> {
    scheduler: &'a IoScheduler,
    is_cancelled: CancelCheck<'a>,
    is_interrupted: bool,
}

impl<'a> StopCheck<'a> {
    pub(crate) fn new(scheduler: &'a IoScheduler, is_cancelled: CancelCheck<'a>) -> Self {
        Self { scheduler, is_cancelled, is_interrupted: false }
    }

    /// Asks whether to stop. The caller is not asked again once it has given up.
    pub(crate) fn must_stop(&mut self) -> bool {
        self.is_interrupted = self.is_interrupted || (self.is_cancelled)();
        self.is_interrupted || self.is_closed()
    }

    /// Returns an error if the call has to stop, which [`outcome`](Self::outcome) replaces.
    pub(crate) fn check(&mut self, verb: &'static str) -> Result<(), IoError> {
        if self.must_stop() { Err(IoError::new(ErrorKind::Cancelled, verb, "it was given up")) } else { Ok(()) }
    }

    /// Waits for a transfer. When the call has to stop, cancels what no worker has started, and waits for the rest:
    /// nothing touches the memory afterwards.
    pub(crate) fn wait<T: TransferMemory>(
        &mut self,
        transfer: Transfer<T>,
    ) -> (Option<T>, Result<Transferred, IoError>) {
        while transfer.check_process().is_ok() && !transfer.wait_timeout(CHECK_INTERVAL) {
            if self.must_stop() {
                transfer.cancel();
                break;
            }
        }
        transfer.wait()
    }

    /// The outcome of the call, given that of its transfers. Closing truncates the files even while a transfer is in
    /// flight, so it spoils a success as well.
    pub(crate) fn outcome<T>(&self, key: &str, moved: Result<T>) -> Result<T> {
        if self.is_closed() {
            return Err(Error::CLOSED);
        }
        moved.map_err(|error| if self.is_interrupted { Error::Interrupted { key: key.into() } } else { error })
    }

    fn is_closed(&self) -> bool {
        self.scheduler.items.lock().is_closed
    }
}
