//! cuFile's batch API: many transfers with one call, reported as they end.
//!
//! NVIDIA's library takes one submission of a batch at a time, and the next when all of that has been reported; so does
//! [`Batch::submit`].

use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::batch_functions::{Event, Functions, MODE, Parameters, READ, Timespec, WRITE};
use super::transfer::IoError;
use super::{CuFile, DeviceSpan, FileHandle};
use crate::abi::Handle;
use crate::device::Device;
use crate::error::{Error, Result, SUCCESS};

/// Questions about a batch that may fail before it is given up.
const ATTEMPTS_MAX: u32 = 10;
const PAUSE: Duration = Duration::from_millis(1);
/// How long a batch that is dropped may be silent.
const PATIENCE_AT_END: Duration = Duration::from_secs(1);

/// One transfer of a batch.
#[derive(Clone, Copy, Debug)]
pub struct BatchEntry<'a> {
    /// From or to which file.
    pub file: &'a FileHandle,
    /// File to memory, or memory to file.
    pub is_read: bool,
    /// Which memory.
    pub span: DeviceSpan,
    /// Where in the file.
    pub offset: u64,
    /// Comes back with the result.
    pub cookie: usize,
}

/// How a transfer of a batch ended: its cookie, and the bytes that it moved.
#[derive(Debug)]
pub struct BatchEvent {
    /// As it was given.
    pub cookie: usize,
    /// What came of it.
    pub result: std::result::Result<usize, IoError>,
}

impl BatchEvent {
    /// What cuFile says; nothing for a transfer that goes on.
    fn of(event: Event) -> Option<Self> {
        event.outcome().map(|result| Self { cookie: event.cookie.addr(), result })
    }
}

/// Room for some transfers at once, between files and one GPU.
pub struct Batch {
    cufile: CuFile,
    functions: &'static Functions,
    device: Arc<Device>,
    handle: Handle,
    entries_max: u32,
    outstanding: u32,
}

// SAFETY: cuFile lets any thread use a batch, one at a time.
unsafe impl Send for Batch {}

impl Batch {
    /// Makes room for so many transfers, or as many as the driver takes at once; `None` where there are no batches.
    ///
    /// # Errors
    /// What cuFile says.
    pub fn new(cufile: &CuFile, device: &Arc<Device>, entries: u32) -> Result<Option<Self>> {
        let Some(functions) = cufile.functions().batch.as_ref() else { return Ok(None) };
        let entries_max = entries.min(cufile.session.properties.batch_entries_max());
        if entries_max == 0 {
            return Ok(None);
        }
        let _current = device.enter()?;
        let mut handle = ptr::null_mut();
        // SAFETY: the pointer is to a value of ours.
        let answer = unsafe { (functions.set_up)(&raw mut handle, entries_max) };
        cufile.check("cuFileBatchIOSetUp", answer)?;
        let (cufile, device) = (cufile.clone(), Arc::clone(device));
        Ok(Some(Self { cufile, functions, device, handle, entries_max, outstanding: 0 }))
    }

    /// Transfers that fit.
    #[must_use]
    pub fn entries_max(&self) -> u32 {
        self.entries_max
    }

    /// Transfers that have not been reported.
    #[must_use]
    pub fn outstanding(&self) -> u32 {
        self.outstanding
    }

    /// Begins all of these transfers, or none.
    ///
    /// # Errors
    /// What cuFile says; it refuses a submission as a whole.
    ///
    /// # Panics
    /// When they do not fit, or when some of the last submission have not been reported.
    ///
    /// # Safety
    /// Until each has been reported, its file stays registered, and its span is memory of this device that nothing else uses;
    /// for as long as [`outstanding`](Self::outstanding) says so, whatever becomes of this value.
    pub unsafe fn submit(&mut self, entries: &[BatchEntry<'_>]) -> Result<()> {
        assert!(self.outstanding == 0 && !entries.is_empty(), "one submission at a time");
        assert!(entries.len() <= self.entries_max as usize, "more transfers than there is room for");
        let parameters = |entry: &BatchEntry<'_>| Parameters {
            mode: MODE,
            base: ptr::with_exposed_provenance_mut(entry.span.base),
            file_offset: entry.offset as i64,
            memory_offset: entry.span.skip as i64,
            bytes: entry.span.bytes,
            handle: entry.file.handle(),
            opcode: if entry.is_read { READ } else { WRITE },
            cookie: ptr::without_provenance_mut(entry.cookie),
        };
        let mut parameters: Vec<_> = entries.iter().map(parameters).collect();
        let _current = self.device.enter()?;
        let count = entries.len() as u32;
        // SAFETY: files and memory are the caller's to keep; the list is read before the call returns.
        let answer = unsafe { (self.functions.submit)(self.handle, count, parameters.as_mut_ptr(), 0) };
        self.cufile.check("cuFileBatchIOSubmit", answer)?;
        self.outstanding = count;
        Ok(())
    }

    /// Waits until one transfer at least has ended, and reports all that have.
    ///
    /// # Errors
    /// What cuFile says, time after time, or that it has had nothing to say for as long as `patience`. Then it is not known
    /// which are over.
    pub fn wait(&mut self, patience: Duration) -> Result<Vec<BatchEvent>> {
        let begin = Instant::now();
        let mut attempts = 1;
        loop {
            match self.ask(patience.saturating_sub(begin.elapsed())) {
                // It was asked to wait for one, and yet some releases answer at once, with none.
                Ok(events) if events.is_empty() && self.outstanding > 0 => {
                    if begin.elapsed() >= patience {
                        return Err(self.silence(patience));
                    }
                    std::thread::sleep(PAUSE / 20);
                }
                Err(_) if attempts < ATTEMPTS_MAX && begin.elapsed() < patience => {
                    attempts += 1;
                    std::thread::sleep(PAUSE);
                }
                answer => return answer,
            }
        }
    }

    fn silence(&self, patience: Duration) -> Error {
        let seconds = patience.as_secs_f32();
        let text = format!("none of {} transfers was reported within {seconds} s", self.outstanding);
        Error { call: "cuFileBatchIOGetStatus", code: SUCCESS, text }
    }

    /// Takes back what has not begun; what has, and what was taken back, is still to be reported.
    ///
    /// # Errors
    /// What cuFile says.
    pub fn cancel(&mut self) -> Result<()> {
        let _current = self.device.enter()?;
        // SAFETY: the handle is a batch until it is dropped.
        let answer = unsafe { (self.functions.cancel)(self.handle) };
        self.cufile.check("cuFileBatchIOCancel", answer)
    }

    /// Waits for one transfer, at most so long.
    fn ask(&mut self, limit: Duration) -> Result<Vec<BatchEvent>> {
        if self.outstanding == 0 {
            return Ok(Vec::new());
        }
        let _current = self.device.enter()?;
        let mut events = vec![Event { cookie: ptr::null_mut(), status: 0, result: 0 }; self.outstanding as usize];
        let mut count = self.outstanding;
        // Without a limit it would wait for a drive that does not answer as long as that takes.
        let mut limit = Timespec::from(limit);
        // SAFETY: there is room for as many events as the count says, and the time limit is read before the call returns.
        let answer =
            unsafe { (self.functions.status)(self.handle, 1, &raw mut count, events.as_mut_ptr(), &raw mut limit) };
        self.cufile.check("cuFileBatchIOGetStatus", answer)?;
        events.truncate(count as usize);
        let ended: Vec<_> = events.into_iter().filter_map(BatchEvent::of).collect();
        self.outstanding -= (ended.len() as u32).min(self.outstanding);
        Ok(ended)
    }
}

impl Drop for Batch {
    /// Waits for what is still moving. Where cuFile does not say how that went, the batch is left to it, and its driver open: to
    /// end them might free what it still works with.
    fn drop(&mut self) {
        if self.outstanding > 0 {
            let _ = self.cancel();
        }
        while self.outstanding > 0 {
            if self.wait(PATIENCE_AT_END).is_err() {
                std::mem::forget(self.cufile.clone());
                return;
            }
        }
        if let Ok(_current) = self.device.enter() {
            // SAFETY: it was set up once, and all of it has been reported.
            unsafe { (self.functions.destroy)(self.handle) }
        }
    }
}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Batch({} of {} under way)", self.outstanding, self.entries_max)
    }
}
