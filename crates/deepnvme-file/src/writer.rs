//! A sequential writer. It copies the caller's bytes into one buffer while other, full buffers are being written.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use deepnvme_io::mem::{Buffer, Region, RegionMut};
use deepnvme_io::{Durability, Engine, Error, ErrorKind, Result, TensorFile, Transfer, WriteOptions};

use crate::open::{Target, is_manifest};
use crate::replace::Replacement;
use crate::{BUFFER_BYTES, BUFFERS};

/// First preallocation. Later ones double the file, by at most [`AHEAD_BYTES_MAX`].
const AHEAD_BYTES_MIN: u64 = if cfg!(simulated) { 32 << 10 } else { 64 << 20 };
/// Largest preallocation.
const AHEAD_BYTES_MAX: u64 = if cfg!(simulated) { 128 << 10 } else { 4 << 30 };

/// Writes a file from its start. The complete file gets its name on commit. Dropping the writer before the commit
/// leaves nothing.
#[derive(Debug)]
pub struct FileWriter {
    // Fields drop in order: the requests in flight end before the temporary is removed.
    in_flight: VecDeque<(Transfer<Region>, RegionMut)>,
    current: Option<Buffer>,
    current_bytes: usize,
    spare: Vec<Buffer>,
    buffer_count: usize,
    engine: Arc<Engine>,
    file: Arc<TensorFile>,
    replacement: Option<Replacement>,
    submitted_bytes: u64,
    allocated_bytes: u64,
    durability: Durability,
    failed: Option<Error>,
}

impl FileWriter {
    /// Creates a writer with a private temporary next to the target.
    ///
    /// # Errors
    /// `InvalidInput` for the manifest of a stripe set, without which the set would be lost. Others if the folder does
    /// not permit or cannot store a new file.
    pub fn create(engine: Arc<Engine>, target: &Target, durability: Durability) -> Result<Self> {
        if let Target::Path(path) = target
            && is_manifest(path)
        {
            let detail = "this is the manifest of a stripe set; to replace the set, pass the StripeSet itself";
            return Err(Error::new(ErrorKind::InvalidInput, "open", detail).at_path(path));
        }
        Self::replacing(engine, Replacement::new(target)?, durability)
    }

    /// Creates a writer of the private files of a replacement.
    ///
    /// # Errors
    /// If the private files cannot be opened.
    pub fn replacing(engine: Arc<Engine>, replacement: Replacement, durability: Durability) -> Result<Self> {
        let file = replacement.open(engine.config().direct)?;
        Ok(Self {
            in_flight: VecDeque::with_capacity(BUFFERS),
            current: None,
            current_bytes: 0,
            spare: Vec::new(),
            buffer_count: 0,
            engine,
            file,
            replacement: Some(replacement),
            submitted_bytes: 0,
            allocated_bytes: 0,
            durability,
            failed: None,
        })
    }

    /// Bytes written so far.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.submitted_bytes + self.current_bytes as u64
    }

    /// Writes all of `bytes`. Waits only while every buffer is being written.
    ///
    /// # Errors
    /// The first failure of any earlier write. The writer is unusable after that.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.fill(bytes.len(), |from, out| {
            out.copy_from_slice(&bytes[from..from + out.len()]);
            Ok(())
        })
    }

    /// Like [`write`](Self::write), from memory of any layout, on the host or a GPU. GPU memory is read after the work
    /// that its stream has at the call.
    ///
    /// # Errors
    /// As [`write`](Self::write), and `Device` or `Unsupported` if copying from the GPU fails.
    pub fn write_region(&mut self, source: &Region) -> Result<()> {
        let gpus = self.engine.gpu_access();
        gpus.record_events([source])?.wait()?;
        self.fill(source.len(), |from, out| gpus.copy_to_slice(source, from, out))
    }

    /// Replaces bytes that were written already, such as a header that states what follows it.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    ///
    /// # Panics
    /// If the bytes would end beyond [`position`](Self::position).
    pub fn overwrite(&mut self, offset: u64, bytes: Vec<u8>) -> Result<()> {
        self.check()?;
        assert!(offset + bytes.len() as u64 <= self.position(), "only what was written is replaced");
        let written = self.flush().and_then(|()| {
            let source = Region::from_vec(bytes);
            self.engine.write(&self.file, offset, source, WriteOptions::default())?.wait().1.map(drop)
        });
        self.remember_failure(written)
    }

    /// Makes the writer unusable after a failure: bytes are lost, and later ones would land at the wrong offset.
    fn remember_failure(&mut self, result: Result<()>) -> Result<()> {
        if let Err(error) = &result {
            self.failed.get_or_insert_with(|| error.clone());
        }
        result
    }

    /// Submits the last, partly filled buffer, and waits for all writes.
    fn flush(&mut self) -> Result<()> {
        if let Some(buffer) = self.current.take() {
            self.submit(buffer)?;
        }
        while !self.in_flight.is_empty() {
            self.reclaim()?;
        }
        Ok(())
    }

    /// Writes `bytes` bytes. `put(offset, out)` fills the buffers piece by piece.
    fn fill(&mut self, bytes: usize, put: impl Fn(usize, &mut [u8]) -> Result<()>) -> Result<()> {
        self.check()?;
        let filled = self.fill_buffers(bytes, put);
        self.remember_failure(filled)
    }

    fn fill_buffers(&mut self, bytes: usize, put: impl Fn(usize, &mut [u8]) -> Result<()>) -> Result<()> {
        let mut done = 0;
        while done < bytes {
            let mut buffer = match self.current.take() {
                Some(buffer) => buffer,
                None => self.next_buffer()?,
            };
            let now = (buffer.len() - self.current_bytes).min(bytes - done);
            put(done, &mut buffer.as_mut_slice()[self.current_bytes..self.current_bytes + now])?;
            self.current_bytes += now;
            done += now;
            if self.current_bytes == buffer.len() {
                self.submit(buffer)?;
            } else {
                self.current = Some(buffer);
            }
        }
        Ok(())
    }

    /// Writes the rest, syncs as the durability requires, and gives the file its name.
    ///
    /// # Errors
    /// The first failure. The old file is then intact and the temporary is removed, unless only the sync after the
    /// rename failed.
    pub fn commit(self) -> Result<()> {
        self.commit_unless(&AtomicBool::new(false))
    }

    /// Like [`commit`](Self::commit), but cancels if `is_cancelled` is true just before the rename. For callers that wait
    /// for the sync on another thread and may stop waiting.
    ///
    /// # Errors
    /// As [`commit`](Self::commit), and `Cancelled`.
    pub fn commit_unless(mut self, is_cancelled: &AtomicBool) -> Result<()> {
        self.check()?;
        let bytes = self.position();
        self.flush()?;
        // Drop the preallocated space.
        self.file.truncate(bytes)?;
        self.engine.sync(&self.file, self.durability.min(Durability::Data))?;
        if is_cancelled.load(Ordering::SeqCst) {
            let error =
                Error::new(ErrorKind::Cancelled, "close", "the caller stopped waiting before the file was renamed");
            return Err(self.replacement.as_ref().map_or(error.clone(), |it| error.at_path(it.target())));
        }
        match self.replacement.take() {
            Some(replacement) => replacement.commit(self.durability == Durability::Full),
            None => Ok(()),
        }
    }

    fn check(&self) -> Result<()> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    fn next_buffer(&mut self) -> Result<Buffer> {
        if let Some(buffer) = self.spare.pop() {
            return Ok(buffer);
        }
        if self.buffer_count < BUFFERS {
            let made = Buffer::zeroed(BUFFER_BYTES).map_err(|error| Error::from_io("allocate a buffer", &error))?;
            self.buffer_count += 1;
            return Ok(made);
        }
        self.reclaim()?;
        let detail = "the engine did not return the buffer of a write; report this as a bug";
        self.spare.pop().ok_or_else(|| Error::new(ErrorKind::Io, "write", detail).at_path(self.file.path()))
    }

    fn submit(&mut self, buffer: Buffer) -> Result<()> {
        let bytes = std::mem::take(&mut self.current_bytes);
        self.allocate_ahead(self.submitted_bytes + bytes as u64);
        let memory = buffer.into_region();
        let source = memory.region().slice(0..bytes);
        let pending = self.engine.write(&self.file, self.submitted_bytes, source, WriteOptions::default())?;
        self.submitted_bytes += bytes as u64;
        self.in_flight.push_back((pending, memory));
        Ok(())
    }

    /// Preallocates in large steps so that writes land inside the file. File systems run such writes in parallel, but
    /// extending writes one by one. On a full disk, the write that needs the space reports the error.
    fn allocate_ahead(&mut self, needed_bytes: u64) {
        if needed_bytes <= self.allocated_bytes || (self.allocated_bytes == 0 && needed_bytes < BUFFER_BYTES as u64) {
            return;
        }
        let step = self.allocated_bytes.clamp(AHEAD_BYTES_MIN, AHEAD_BYTES_MAX);
        let target = needed_bytes + step;
        self.allocated_bytes = if self.file.allocate_len(target).is_ok() { target } else { u64::MAX };
    }

    /// Waits for the oldest write, and takes back its buffer.
    fn reclaim(&mut self) -> Result<()> {
        let Some((pending, memory)) = self.in_flight.pop_front() else {
            return Ok(());
        };
        let (source, result) = pending.wait();
        drop(source);
        if let Ok(buffer) = memory.into_buffer() {
            self.spare.push(buffer);
        } else {
            self.buffer_count -= 1;
        }
        if let Err(error) = result {
            let target = self.replacement.as_ref().map(|replacement| replacement.target().to_path_buf());
            return Err(target.map_or(error.clone(), |target| error.at_path(target)));
        }
        Ok(())
    }
}

impl Drop for FileWriter {
    fn drop(&mut self) {
        while let Some((pending, memory)) = self.in_flight.pop_front() {
            pending.cancel();
            let _ = pending.wait();
            drop(memory);
        }
    }
}
