//! cuFile's batch API: many transfers per call.
//!
//! NVIDIA's library takes one submission at a time per batch, and the next when all of its transfers are reported.
//! [`Batch::submit`] does the same.

use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::batch_functions::{Event, Functions, MODE, Parameters, READ, Timespec, WRITE};
use super::error::IoResult;
use super::{CuFile, DeviceSpan, FileHandle};
use crate::abi::Handle;
use crate::device::Device;
use crate::error::{Error, ErrorCode, Result};

/// Failed status calls before a batch is given up.
const ATTEMPTS_MAX: u32 = 10;
const RETRY_DELAY: Duration = Duration::from_millis(1);
/// The timeout of a dropped batch without progress.
const DROP_TIMEOUT: Duration = Duration::from_secs(1);

/// One transfer of a batch.
#[derive(Clone, Copy, Debug)]
pub struct BatchEntry<'a> {
    /// The file.
    pub file: &'a FileHandle,
    /// Whether the transfer reads the file.
    pub is_read: bool,
    /// The memory.
    pub span: DeviceSpan,
    /// Offset in the file.
    pub offset: u64,
    /// Returned with the result.
    pub cookie: usize,
}

/// A completed transfer of a batch.
#[derive(Debug)]
pub struct BatchEvent {
    /// The cookie of the entry.
    pub cookie: usize,
    /// The bytes transferred, or the error.
    pub result: IoResult,
}

impl BatchEvent {
    /// Converts cuFile's event; `None` for a transfer in progress.
    fn of(event: Event) -> Option<Self> {
        event.outcome().map(|result| Self { cookie: event.cookie.addr(), result })
    }
}

/// A batch of transfers between files and one GPU.
pub struct Batch {
    cufile: CuFile,
    functions: &'static Functions,
    device: Arc<Device>,
    handle: Handle,
    entries_max: u32,
    outstanding: u32,
}

// SAFETY: cuFile allows any thread to use a batch, one at a time. `submit`, `cancel` and `wait` take `&mut self`.
unsafe impl Send for Batch {}

impl Batch {
    /// Creates a batch of `entries` transfers, or of the driver's maximum if that is less. Returns `None` if the
    /// library has no batches, or the number is zero.
    ///
    /// # Errors
    /// cuFile's error.
    pub fn new(cufile: &CuFile, device: &Arc<Device>, entries: u32) -> Result<Option<Self>> {
        let Some(functions) = cufile.functions().batch.as_ref() else { return Ok(None) };
        let entries_max = entries.min(cufile.session.properties.batch_entries_max());
        if entries_max == 0 {
            return Ok(None);
        }
        let _current = device.enter()?;
        let mut handle = ptr::null_mut();
        // SAFETY: the pointer is to a local value.
        let status = unsafe { (functions.set_up)(&raw mut handle, entries_max) };
        cufile.check("cuFileBatchIOSetUp", status)?;
        let (cufile, device) = (cufile.clone(), Arc::clone(device));
        Ok(Some(Self { cufile, functions, device, handle, entries_max, outstanding: 0 }))
    }

    /// Returns the maximum number of transfers.
    #[must_use]
    pub fn entries_max(&self) -> u32 {
        self.entries_max
    }

    /// Returns the number of unreported transfers.
    #[must_use]
    pub fn outstanding(&self) -> u32 {
        self.outstanding
    }

    /// Starts all of these transfers, or none.
    ///
    /// # Errors
    /// cuFile's error; it refuses a submission as a whole.
    ///
    /// # Panics
    /// If there are none, if they do not fit, or if transfers of the last submission are unreported.
    ///
    /// # Safety
    /// Until a transfer is reported, its file stays registered, and its span is memory of this device with no other
    /// access. This holds as long as [`outstanding`](Self::outstanding) counts it, even after this value is dropped.
    pub unsafe fn submit(&mut self, entries: &[BatchEntry<'_>]) -> Result<()> {
        assert!(self.outstanding == 0 && !entries.is_empty(), "one submission at a time");
        assert!(entries.len() <= self.entries_max as usize, "more transfers than there is room for");
        let parameters = |entry: &BatchEntry<'_>| Parameters {
            mode: MODE,
            base: ptr::with_exposed_provenance_mut(entry.span.base),
            file_offset: entry.offset as i64,
            memory_offset: entry.span.offset_in_base as i64,
            bytes: entry.span.bytes,
            handle: entry.file.handle(),
            opcode: if entry.is_read { READ } else { WRITE },
            cookie: ptr::without_provenance_mut(entry.cookie),
        };
        let mut parameters: Vec<_> = entries.iter().map(parameters).collect();
        let _current = self.device.enter()?;
        let count = entries.len() as u32;
        // SAFETY: files and memory stay valid while `outstanding` counts the transfers, as the caller of `submit`
        // ensures. cuFile reads the list before it returns.
        let status = unsafe { (self.functions.submit)(self.handle, count, parameters.as_mut_ptr(), 0) };
        self.cufile.check("cuFileBatchIOSubmit", status)?;
        self.outstanding = count;
        Ok(())
    }

    /// Waits for at least one transfer, and returns all completed ones. Returns none at once if all are reported.
    ///
    /// # Errors
    /// cuFile's error if it persists, or that no transfer completed within `timeout`. Then it is unknown which are
    /// complete.
    pub fn wait(&mut self, timeout: Duration) -> Result<Vec<BatchEvent>> {
        let begin = Instant::now();
        let mut attempts = 1;
        loop {
            match self.poll(timeout.saturating_sub(begin.elapsed())) {
                // Some releases return no event immediately, although the call waits for one.
                Ok(events) if events.is_empty() && self.outstanding > 0 => {
                    if begin.elapsed() >= timeout {
                        return Err(self.timeout_error(timeout));
                    }
                    std::thread::sleep(RETRY_DELAY / 20);
                }
                Err(_) if attempts < ATTEMPTS_MAX && begin.elapsed() < timeout => {
                    attempts += 1;
                    std::thread::sleep(RETRY_DELAY);
                }
                status => return status,
            }
        }
    }

    fn timeout_error(&self, timeout: Duration) -> Error {
        let seconds = timeout.as_secs_f32();
        let text = format!("none of {} transfers was reported within {seconds} s", self.outstanding);
        Error { call: "cuFileBatchIOGetStatus", code: ErrorCode::TimedOut, text }
    }

    /// Cancels transfers that have not started. Started and cancelled ones are still reported.
    ///
    /// # Errors
    /// cuFile's error.
    pub fn cancel(&mut self) -> Result<()> {
        let _current = self.device.enter()?;
        // SAFETY: `new` created the handle, and only `drop` destroys it.
        let status = unsafe { (self.functions.cancel)(self.handle) };
        self.cufile.check("cuFileBatchIOCancel", status)
    }

    /// Waits for one transfer, at most `limit`.
    fn poll(&mut self, limit: Duration) -> Result<Vec<BatchEvent>> {
        if self.outstanding == 0 {
            return Ok(Vec::new());
        }
        let _current = self.device.enter()?;
        let mut events = vec![Event { cookie: ptr::null_mut(), status: 0, result: 0 }; self.outstanding as usize];
        let mut count = self.outstanding;
        // Without a limit it would wait forever for a drive that does not respond.
        let mut limit = Timespec::from(limit);
        // SAFETY: there is room for `count` events, and the limit is read before the call returns.
        let status =
            unsafe { (self.functions.status)(self.handle, 1, &raw mut count, events.as_mut_ptr(), &raw mut limit) };
        self.cufile.check("cuFileBatchIOGetStatus", status)?;
        events.truncate(count as usize);
        let ended: Vec<_> = events.into_iter().filter_map(BatchEvent::of).collect();
        self.outstanding -= (ended.len() as u32).min(self.outstanding);
        Ok(ended)
    }
}

impl Drop for Batch {
    /// Waits for transfers in progress. If cuFile does not report them, the batch and its driver are leaked:
    /// destroying them might free memory in use.
    fn drop(&mut self) {
        if self.outstanding > 0 {
            let _ = self.cancel();
        }
        while self.outstanding > 0 {
            if self.wait(DROP_TIMEOUT).is_err() {
                std::mem::forget(self.cufile.clone());
                return;
            }
        }
        if let Ok(_current) = self.device.enter() {
            // SAFETY: `new` created the handle and only this drop destroys it. No transfer uses it any more, since all
            // have been reported.
            unsafe { (self.functions.destroy)(self.handle) }
        }
    }
}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Batch({} of {} in flight)", self.outstanding, self.entries_max)
    }
}
