//! A reader with a position: small reads come from buffers that are filled ahead, large ones go straight to the
//! caller's memory.

use std::collections::VecDeque;
use std::sync::Arc;

use deepnvme_mem::{Buffer, RegionMut};

use super::{BUFFER_BYTES, BUFFERS};
use crate::engine::Engine;
use crate::error::{Error, ErrorKind, Result};
use crate::file::{Access, OpenOptions, Target, TensorFile};
use crate::job::Transfer;
use crate::pending::Pending;

/// Bytes of the first buffer after a jump; it doubles while the reading goes on in order.
const FIRST_BYTES: usize = 64 << 10;

/// Reads a file in any order, best from start to end.
#[derive(Debug)]
pub struct FileReader {
    // Dropped first: the requests in flight end before the file closes.
    ahead: VecDeque<Window>,
    current: Option<(u64, Buffer, usize)>,
    engine: Arc<Engine>,
    file: Arc<TensorFile>,
    file_bytes: u64,
    next_bytes: usize,
}

#[derive(Debug)]
struct Window {
    offset: u64,
    bytes: usize,
    pending: Pending<RegionMut>,
}

impl FileReader {
    /// Opens a file or stripe set; its length is taken now.
    ///
    /// # Errors
    /// The kernel's refusal, with the path.
    pub fn open(engine: Arc<Engine>, target: &Target) -> Result<Self> {
        let options = OpenOptions { access: Access::Read, create: false, direct: engine.config().direct };
        let file = TensorFile::open(target, options)?;
        let file_bytes = file.len()?;
        Ok(Self { ahead: VecDeque::new(), current: None, engine, file, file_bytes, next_bytes: FIRST_BYTES })
    }

    /// Bytes in the file when it was opened.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.file_bytes
    }

    /// Whether the file had no bytes when it was opened.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.file_bytes == 0
    }

    /// Fills `out` from `offset` on, as far as the file goes; how many bytes that were.
    ///
    /// # Errors
    /// The first failure of a read, or a file that has become shorter.
    pub fn read_at(&mut self, mut offset: u64, mut out: &mut [u8]) -> Result<usize> {
        let mut total = 0;
        while !out.is_empty() && offset < self.file_bytes {
            if !self.holds(offset) {
                self.go_to(offset)?;
            }
            let Some((start, buffer, bytes)) = &self.current else {
                break;
            };
            let from = (offset - start) as usize;
            let now = (bytes - from).min(out.len());
            out[..now].copy_from_slice(&buffer.as_slice()[from..from + now]);
            out = &mut out[now..];
            offset += now as u64;
            total += now;
        }
        Ok(total)
    }

    /// Starts a read of all of `target` from `offset`, past the buffers.
    ///
    /// # Errors
    /// As [`Engine::read`].
    pub fn start_read(&self, offset: u64, target: RegionMut) -> Result<Pending<RegionMut>> {
        self.engine.read(&self.file, offset, target)
    }

    fn holds(&self, offset: u64) -> bool {
        self.current.as_ref().is_some_and(|(start, _, bytes)| (*start..start + *bytes as u64).contains(&offset))
    }

    /// Makes the buffer that holds `offset` the current one, and keeps others coming.
    fn go_to(&mut self, offset: u64) -> Result<()> {
        let mut spare = self.current.take().map(|(_, buffer, _)| buffer);
        let is_next = self.ahead.front().is_some_and(|window| window.offset == offset);
        if is_next {
            self.next_bytes = (self.next_bytes * 2).min(BUFFER_BYTES);
        } else {
            self.ahead.clear();
            self.next_bytes = FIRST_BYTES;
            self.request(offset, spare.take())?;
        }
        let Some(window) = self.ahead.pop_front() else {
            return Ok(());
        };
        let mut next = window.offset + window.bytes as u64;
        if is_next {
            // Reading in order: keep the others busy while this one is used.
            next = self.ahead.back().map_or(next, |last| last.offset + last.bytes as u64);
            while self.ahead.len() + 2 < BUFFERS && next < self.file_bytes {
                next += self.request(next, spare.take())? as u64;
            }
        } else {
            self.request(next, None)?;
        }
        let (offset, bytes) = (window.offset, window.bytes);
        let (memory, result) = window.pending.wait();
        let Transfer { .. } = result?;
        let buffer = memory.and_then(|memory| memory.into_buffer().ok());
        let buffer = buffer.ok_or_else(|| Error::new(ErrorKind::Io, "read", "a buffer did not come home"))?;
        self.current = Some((offset, buffer, bytes));
        Ok(())
    }

    /// Starts to fill a buffer from `offset` on; how many bytes that will be.
    fn request(&mut self, offset: u64, spare: Option<Buffer>) -> Result<usize> {
        let bytes = (self.next_bytes as u64).min(self.file_bytes.saturating_sub(offset)) as usize;
        if bytes == 0 {
            return Ok(0);
        }
        let buffer = match spare.filter(|buffer| buffer.len() == bytes) {
            Some(buffer) => buffer,
            None => Buffer::zeroed(bytes).map_err(|error| {
                let errno = rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::NOMEM);
                Error::os("allocate a buffer", errno)
            })?,
        };
        let pending = self.engine.read(&self.file, offset, buffer.into_region())?;
        self.ahead.push_back(Window { offset, bytes, pending });
        Ok(bytes)
    }
}
