//! A batch of rows that is being read. The first thread that needs it completes it.

use std::sync::{Arc, PoisonError};

use deepnvme_file::{FileChange, VersionedFile};
use deepnvme_io::mem::{Buffer, RegionMut};
use deepnvme_io::{Error as IoError, ErrorKind, Transfer};

use crate::blocks::BlockChecker;
use crate::error::{Error, Result};
use crate::read_plan::Run;
use crate::staging::{POLL_INTERVAL, Staging};
use crate::sync::{Condvar, Mutex, lock};

/// Rows in a buffer, on their way or there.
#[derive(Debug)]
pub(crate) struct Fetch {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
enum State {
    /// Its rows are being claimed.
    Planning,
    InFlight(Box<Reading>),
    /// A thread waits for the read.
    Completing,
    Done(Result<Arc<Fetched>>),
}

/// The result of a fetch, and the rows that it was for.
type Completed = (Result<Arc<Fetched>>, Arc<FetchedRows>);

/// A read in flight.
#[derive(Debug)]
pub(crate) struct Reading {
    pub(crate) transfer: Transfer<Vec<RegionMut>>,
    /// The files of the table, and those that this reads.
    pub(crate) files: Arc<[VersionedFile]>,
    pub(crate) used_files: Vec<usize>,
    /// The checksums of a packed table.
    pub(crate) checks: Option<BlockChecks>,
    /// The parts of the buffer that nothing is read into.
    pub(crate) rest: Vec<RegionMut>,
    pub(crate) rows: Arc<FetchedRows>,
    pub(crate) staging: Arc<Staging>,
}

/// The blocks of a packed table that a read brings.
#[derive(Debug)]
pub(crate) struct BlockChecks {
    pub(crate) checker: BlockChecker,
    /// The offset of the first block of the table.
    pub(crate) start: u64,
    /// The rows of the table.
    pub(crate) rows: u64,
    pub(crate) runs: Vec<Run>,
}

impl BlockChecks {
    /// Compares all blocks of a read with their checksums.
    pub(crate) fn check(&self, buffer: &[u8], files: &[VersionedFile]) -> Result<()> {
        let block_bytes = self.checker.layout.block_bytes;
        for run in &self.runs {
            let first = (run.range.start - self.start) / block_bytes as u64;
            for (index, block) in buffer[run.start..run.start + run.len()].chunks(block_bytes).enumerate() {
                let number = first + index as u64;
                if block.len() < block_bytes || !self.checker.is_sound(number, block) {
                    let per_block = self.checker.layout.rows_per_block as u64;
                    let first = (number * per_block).min(self.rows);
                    return Err(Error::Checksum {
                        path: files[run.file].file().path().to_path_buf(),
                        offset: run.range.start + (index * block_bytes) as u64,
                        rows: first..((number + 1) * per_block).min(self.rows),
                    });
                }
            }
        }
        Ok(())
    }
}

/// Rows and their places in a buffer.
#[derive(Clone, Debug, Default)]
pub(crate) struct FetchedRows {
    /// Ascending.
    pub(crate) rows: Vec<u64>,
    pub(crate) places: Vec<usize>,
}

/// Rows that have arrived.
#[derive(Debug)]
pub(crate) struct Fetched {
    pub(crate) rows: Arc<FetchedRows>,
    row_bytes: usize,
    /// `None` once it is returned.
    buffer: Option<Buffer>,
    staging: Arc<Staging>,
}

impl Fetched {
    /// Returns the bytes of a row.
    pub(crate) fn get(&self, row: u64) -> Option<&[u8]> {
        self.rows.rows.binary_search(&row).ok().map(|index| self.bytes(index))
    }

    /// Returns the bytes of the row with this index.
    pub(crate) fn bytes(&self, index: usize) -> &[u8] {
        let place = self.rows.places[index];
        let bytes = self.buffer.as_ref().map_or(&[][..], Buffer::as_slice);
        &bytes[place..place + self.row_bytes]
    }
}

impl Drop for Fetched {
    fn drop(&mut self) {
        self.staging.put_back(self.buffer.take());
    }
}

impl Fetch {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State::Planning), changed: Condvar::default() })
    }

    /// Makes the read that was planned known.
    pub(crate) fn start(&self, reading: Reading) {
        self.set(State::InFlight(Box::new(reading)));
    }

    /// Ends a fetch that cannot begin.
    pub(crate) fn fail(&self, error: Error) {
        self.set(State::Done(Err(error)));
    }

    fn set(&self, state: State) {
        *lock(&self.state) = state;
        self.changed.notify_all();
    }

    /// Raises the priority of its read, because a caller waits.
    pub(crate) fn prioritise(&self) {
        if let State::InFlight(reading) = &*lock(&self.state) {
            reading.transfer.prioritise();
        }
    }

    /// Cancels the part of the read that has not begun.
    pub(crate) fn cancel(&self) {
        if let State::InFlight(reading) = &*lock(&self.state) {
            reading.transfer.cancel();
        }
    }

    /// Waits for the rows. `ended` is called by the thread that completes the fetch, and by no other. `should_stop` is
    /// asked from time to time.
    pub(crate) fn wait(
        &self,
        row_bytes: usize,
        should_stop: &dyn Fn() -> bool,
        ended: impl FnOnce(&Result<Arc<Fetched>>, &[u64]),
    ) -> Result<Arc<Fetched>> {
        let mut state = lock(&self.state);
        loop {
            match std::mem::replace(&mut *state, State::Completing) {
                State::Done(result) => {
                    *state = State::Done(result.clone());
                    return result;
                }
                State::InFlight(reading) => {
                    drop(state);
                    return match reading.complete(row_bytes, should_stop) {
                        Ok((result, rows)) => {
                            self.set(State::Done(result.clone()));
                            ended(&result, &rows.rows);
                            result
                        }
                        Err(unfinished) => {
                            self.set(State::InFlight(unfinished));
                            Err(Error::Interrupted)
                        }
                    };
                }
                waiting @ (State::Planning | State::Completing) => {
                    *state = waiting;
                    if should_stop() {
                        return Err(Error::Interrupted);
                    }
                    let waited = self.changed.wait_timeout(state, POLL_INTERVAL);
                    state = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
    }
}

impl Reading {
    /// Waits for the read, and takes its rows. Returns the read if the caller is to stop.
    fn complete(self: Box<Self>, row_bytes: usize, should_stop: &dyn Fn() -> bool) -> Result<Completed, Box<Self>> {
        while !self.transfer.wait_timeout(POLL_INTERVAL) {
            if let Err(forked) = self.transfer.check_process() {
                return Ok((Err(forked.into()), self.rows));
            }
            if should_stop() {
                return Err(self);
            }
        }
        let Self { transfer, files, used_files, checks, rest, rows, staging } = *self;
        let (memory, result) = transfer.wait();
        let buffer = memory.and_then(|parts| join(parts, rest));
        let fetched = Arc::new(Fetched { rows: Arc::clone(&rows), row_bytes, buffer, staging });
        // Rows that arrived before this check are those of the file that was opened.
        let result = match result.map_err(Error::from).and_then(|_| check_unchanged(&files, &used_files)) {
            Ok(()) if fetched.buffer.is_some() => {
                let bytes = fetched.buffer.as_ref().map_or(&[][..], Buffer::as_slice);
                checks.map_or(Ok(()), |checks| checks.check(bytes, &files)).map(|()| fetched)
            }
            Ok(()) => {
                let detail = "the engine did not return the buffer of a read; report this as a bug";
                Err(IoError::new(ErrorKind::Io, "read", detail).into())
            }
            // A file that was cut ends early.
            Err(error) => Err(check_unchanged(&files, &used_files).err().unwrap_or(error)),
        };
        Ok((result, rows))
    }
}

/// Joins all parts of a buffer.
pub(crate) fn join(mut parts: Vec<RegionMut>, rest: Vec<RegionMut>) -> Option<Buffer> {
    parts.extend(rest);
    parts.sort_unstable_by_key(|part| (part.addr(), part.len()));
    let mut parts = parts.into_iter();
    let first = parts.next()?;
    parts.try_fold(first, |whole, part| whole.join(part).ok())?.into_buffer().ok()
}

pub(crate) fn check_unchanged(files: &[VersionedFile], used: &[usize]) -> Result<()> {
    for index in used {
        if let Some(FileChange { path, what }) = files[*index].change()? {
            return Err(Error::Changed { path, what });
        }
    }
    Ok(())
}
