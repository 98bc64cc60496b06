//! A file reader. Small reads come from windows that are read ahead. Large reads go straight to the caller's memory.
//! Cached data is copied from the page cache.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use deepnvme_io::mem::{Buffer, Device, PAGE_BYTES, Region, RegionMut};

use crate::open::{Target, open};
use crate::prefetch_window::{Filling, Held, Window};
use crate::{BUFFER_BYTES, BUFFERS};
use deepnvme_io::Engine;
use deepnvme_io::Transfer;
use deepnvme_io::op::Errno;
use deepnvme_io::{Access, OpenOptions, TensorFile};
use deepnvme_io::{Error, ErrorKind, Result, fs};

/// Size of the first window after a jump. It doubles while the access is sequential.
const FIRST_BYTES: usize = if cfg!(simulated) { 4 << 10 } else { 64 << 10 };
/// Maximum size of a window.
const WINDOW_BYTES_MAX: usize = if cfg!(simulated) { 8 << 10 } else { 2 << 20 };
/// Maximum number of windows besides the current one. All together have at most the memory of a writer's buffers.
const AHEAD_MAX: usize = BUFFERS * BUFFER_BYTES / WINDOW_BYTES_MAX - 1;
/// Maximum size of a window from the page cache, so that it stays in the CPU cache.
const CACHED_BYTES_MAX: usize = 256 << 10;
/// Smallest read that is copied from the page cache without a window.
const UNWINDOWED_BYTES_MIN: usize = 16 << 10;
/// Windows start at multiples of this, so that they need no bounce buffer on common devices.
const WINDOW_ALIGNMENT_BYTES: u64 = PAGE_BYTES;

/// Reads a file in any order. Fastest from start to end.
#[derive(Debug)]
pub struct FileReader {
    // Dropped first: the requests in flight end before the file closes.
    ahead: VecDeque<Window>,
    current: Option<Held>,
    engine: Arc<Engine>,
    file: Arc<TensorFile>,
    file_bytes: u64,
    next_bytes: usize,
    read_ahead: bool,
}

/// Size of the host buffer for small or misaligned reads to a GPU.
const GPU_STEP_BYTES: usize = 8 << 20;

impl FileReader {
    /// Opens a file or stripe set and records its length.
    ///
    /// # Errors
    /// As [`open()`](crate::open()), and `Closed` in a forked child. `Unsupported` for a file with bytes but without a
    /// size, as in `/proc`.
    pub fn open(engine: Arc<Engine>, target: &Target) -> Result<Self> {
        engine.check_process()?;
        let direct = engine.config().direct;
        let file = open(target, OpenOptions { access: Access::Read, create: false, direct })?;
        let file_bytes = file.len()?;
        if file_bytes == 0 && has_hidden_bytes(&file) {
            let detail = "the system states no size for it, as for files in /proc; read it with the built-in open";
            return Err(Error::new(ErrorKind::Unsupported, "open", detail).at_path(target.path()));
        }
        Ok(Self {
            ahead: VecDeque::new(),
            current: None,
            engine,
            file,
            file_bytes,
            next_bytes: FIRST_BYTES,
            read_ahead: true,
        })
    }

    /// Returns the length of the file when it was opened.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.file_bytes
    }

    /// Returns whether the file was empty when it was opened.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.file_bytes == 0
    }

    /// Reads from `offset` into `out`, up to the end of the file. Returns the number of bytes.
    ///
    /// # Errors
    /// The first failed read, or an error if the file was truncated.
    pub fn read_at(&mut self, offset: u64, out: &mut [u8]) -> Result<usize> {
        let wanted = out.len();
        self.gather(offset, wanted, None, &mut |at, bytes| out[at..at + bytes.len()].copy_from_slice(bytes))
    }

    /// Like [`read_at`](Self::read_at), into host memory of any layout.
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at).
    pub fn read_into(&mut self, offset: u64, target: &RegionMut) -> Result<usize> {
        let memory = target.is_contiguous().then(|| target.region());
        self.gather(offset, target.len(), memory.as_ref(), &mut |at, bytes| target.copy_from_slice(at, bytes))
    }

    /// Reads into the start of GPU memory, up to the end of the file. Returns the number of bytes.
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at), and `Device` or `Unsupported` if copying to the GPU fails.
    pub fn read_to_gpu(&mut self, offset: u64, target: &RegionMut) -> Result<usize> {
        let bytes = self.file_bytes.saturating_sub(offset).min(target.len() as u64) as usize;
        let mut step = vec![0; bytes.min(GPU_STEP_BYTES)];
        let gpus = self.engine.gpu_access();
        gpus.record_events([&target.region()])?.wait()?;
        let mut done = 0;
        while done < bytes {
            let step_bytes = step.len().min(bytes - done);
            let read = self.read_at(offset + done as u64, &mut step[..step_bytes])?;
            if read == 0 {
                break;
            }
            gpus.copy_from_slice(target, done, &step[..read])?;
            done += read;
        }
        Ok(done)
    }

    /// Fills `target` if the current window contains all of it. Returns whether it did. Never waits.
    #[must_use]
    pub fn read_held(&self, offset: u64, target: &RegionMut) -> bool {
        let held = self.current.as_ref().and_then(|held| held.from(offset));
        let Some(bytes) = held.and_then(|bytes| bytes.get(..target.len())) else { return false };
        target.copy_from_slice(0, bytes);
        true
    }

    /// Starts a read of all of `target` from `offset`, without a window. Bytes that a window already contains are
    /// copied, and the transfer is for the rest. Also starts to read a small window after the range, for the header of
    /// a record that may follow.
    ///
    /// # Errors
    /// As [`Engine::read`].
    pub fn start_read(&mut self, offset: u64, target: RegionMut) -> Result<Transfer<RegionMut>> {
        let end = offset.saturating_add(target.len() as u64);
        let fetched_bytes = if target.is_contiguous() && target.device() == Device::Host {
            self.fetched_bytes(offset).min(target.len())
        } else {
            0
        };
        let (pending, head) = if fetched_bytes > 0 {
            let (head, rest) = target.split_at(fetched_bytes);
            (self.engine.read(&self.file, offset + fetched_bytes as u64, rest)?, Some(head))
        } else {
            (self.engine.read(&self.file, offset, target)?, None)
        };
        if let Some(head) = head {
            self.read_ahead = false;
            let read = self.read_into(offset, &head);
            self.read_ahead = true;
            read?;
        }
        while self.ahead.front().is_some_and(|window| window.end() <= end) {
            self.ahead.pop_front();
        }
        if self.ahead.front().is_some_and(|window| window.offset > end) {
            self.give_up_ahead();
        }
        if self.ahead.is_empty() {
            self.next_bytes = FIRST_BYTES;
            self.request(end, None)?;
        }
        Ok(pending)
    }

    fn give_up_ahead(&mut self) {
        self.ahead.drain(..).for_each(Window::cancel);
    }

    /// Bytes from `offset` on that are in windows or in flight to them.
    fn fetched_bytes(&self, offset: u64) -> usize {
        let mut end = self.current.as_ref().and_then(|held| held.from(offset).map(|_| held.end()));
        for window in &self.ahead {
            if window.holds(end.unwrap_or(offset)) {
                end = Some(window.end());
            }
        }
        end.map_or(0, |end| (end - offset) as usize)
    }

    fn gather(
        &mut self,
        offset: u64,
        wanted: usize,
        memory: Option<&Region>,
        put: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<usize> {
        let wanted = (wanted as u64).min(self.file_bytes.saturating_sub(offset)) as usize;
        let mut done = 0;
        while done < wanted {
            let at = offset + done as u64;
            if let Some(bytes) = self.current.as_ref().and_then(|held| held.from(at)) {
                let now = bytes.len().min(wanted - done);
                put(done, &bytes[..now]);
                done += now;
                continue;
            }
            if let Some(memory) = memory.filter(|_| wanted - done >= UNWINDOWED_BYTES_MIN)
                && self.is_cached(&(at..offset + wanted as u64))
            {
                let bytes = self.read_cached(at, &memory.slice(done..wanted))?;
                done += bytes;
                if bytes > 0 {
                    continue;
                }
            }
            self.go_to(at)?;
        }
        Ok(done)
    }

    /// Makes the window that contains `offset` the current one. Reads further windows ahead while the access is
    /// sequential.
    fn go_to(&mut self, offset: u64) -> Result<()> {
        let before = self.current.as_ref().map(Held::end);
        let spare = self.current.take().map(Held::into_buffer);
        // A short jump may have passed the end of a window.
        while self.ahead.front().is_some_and(|window| window.end() <= offset) {
            self.ahead.pop_front();
        }
        let next = self.ahead.front().filter(|window| window.holds(offset)).map(|window| window.offset);
        let goes_on = before.is_some_and(|before| before == offset || Some(before) == next);
        self.next_bytes = if goes_on { (self.next_bytes * 2).min(WINDOW_BYTES_MAX) } else { FIRST_BYTES };
        let mut spare = spare;
        if next.is_none() {
            self.give_up_ahead();
            self.request(offset, spare.take())?;
        }
        let Some(window) = self.ahead.pop_front() else { return Ok(()) };
        if goes_on && self.read_ahead && !window.is_full() {
            while self.ahead.len() < AHEAD_MAX {
                let next = self.ahead.back().map_or(window.end(), Window::end);
                if self.request(next, spare.take())? == next {
                    break;
                }
            }
        }
        self.current = Some(window.wait().map_err(|error| error.at_path(self.file.path()))?);
        Ok(())
    }

    /// Starts to fill a window that begins at `offset`, rounded down for alignment. Returns the end of the window, or
    /// `offset` at the end of the file.
    fn request(&mut self, offset: u64, spare: Option<Buffer>) -> Result<u64> {
        if offset >= self.file_bytes {
            return Ok(offset);
        }
        let offset = offset / WINDOW_ALIGNMENT_BYTES * WINDOW_ALIGNMENT_BYTES;
        let bytes_of = |most: usize| (most as u64).min(self.file_bytes - offset) as usize;
        let cached_bytes = bytes_of(self.next_bytes.min(CACHED_BYTES_MAX));
        let is_cached = self.is_cached(&(offset..offset + cached_bytes as u64));
        let bytes = if is_cached { cached_bytes } else { bytes_of(self.next_bytes) };
        let buffer = match spare.filter(|buffer| buffer.len() == bytes) {
            Some(buffer) => buffer,
            None => Buffer::zeroed(bytes).map_err(|error| {
                let errno = Errno::from_io_error(&error).unwrap_or(Errno::NOMEM);
                Error::os("allocate a buffer", errno)
            })?,
        };
        let memory = buffer.into_region();
        if is_cached && self.read_cached(offset, &memory.region())? == bytes {
            if let Ok(buffer) = memory.into_buffer() {
                self.ahead.push_back(Window { offset, bytes, filling: Filling::Full(buffer) });
            }
            return Ok(offset + bytes as u64);
        }
        let pending = self.engine.read_ahead(&self.file, offset, memory)?;
        self.ahead.push_back(Window { offset, bytes, filling: Filling::InFlight(pending) });
        Ok(offset + bytes as u64)
    }

    /// Returns whether copying the range from the page cache, as [`read_into`](Self::read_into) does, beats reading the
    /// device. The kernel reads the few missing pages. Always false if direct I/O is required.
    #[must_use]
    pub fn is_cached(&self, range: &Range<u64>) -> bool {
        self.file.is_mostly_cached(range)
    }

    /// Copies from the page cache on this thread. Returns the number of bytes. The number is 0 at the end of the file;
    /// a read by the engine then reports the end.
    fn read_cached(&self, offset: u64, memory: &Region) -> Result<usize> {
        self.file.read_through_cache(offset, memory)
    }
}

/// Returns whether a file has bytes although its size is zero, as files of /proc do.
fn has_hidden_bytes(file: &TensorFile) -> bool {
    fs::read_at(file.descriptor(), &mut [0], 0).is_ok_and(|count| count > 0)
}
