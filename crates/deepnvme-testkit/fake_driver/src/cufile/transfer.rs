//! One transfer: checked when requested, then moved in pieces by real system calls on the caller's descriptor.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use crate::abi::{Device, Handle};
use crate::access::{Access, Shape};
use crate::cufile::abi::{
    CUDA_CONTEXT_MISMATCH, CUDA_POINTER_INVALID, FileOutcome, HANDLE_NOT_REGISTERED, INVALID_CONTEXT_ERROR,
    INVALID_MAPPING_RANGE, INVALID_VALUE,
};
use crate::cufile::registered::{File, device_of};
use crate::cufile::session::opened;
use crate::mapped_range::{MappedRange, Side};
use crate::memory::page_bytes;
use crate::race_detector::{Clock, Point, TrackedOp};
use crate::rng::Rng;
use crate::state::{DriverState, lock};
use crate::stream::StreamId;

/// Alignment that direct I/O requires of offsets, sizes and addresses.
const ALIGNMENT: u64 = 4096;
/// The maximum number of pages of a piece.
const PIECE_PAGES_MAX: u64 = 32;

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Read,
    Write,
}

/// A requested transfer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    direction: Direction,
    handle: Handle,
    file_offset: i64,
    memory: RequestedMemory,
}

/// The memory of a requested transfer, as the caller states it.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestedMemory {
    pub(super) base: u64,
    pub(super) offset: i64,
    pub(super) bytes: usize,
}

/// A checked transfer, with everything that it needs.
pub(super) struct Transfer {
    direction: Direction,
    file: Arc<File>,
    range: MappedRange,
    device: Option<Device>,
    bytes: usize,
    file_offset: i64,
    pub(super) used: Access,
    rng: Rng,
    delay: Duration,
}

impl Direction {
    /// Returns the fault point that makes a transfer short.
    fn short(self) -> &'static str {
        match self {
            Self::Read => "cuFileRead@short",
            Self::Write => "cuFileWrite@short",
        }
    }
}

impl Request {
    pub(super) fn new(direction: Direction, handle: Handle, file_offset: i64, memory: RequestedMemory) -> Self {
        Self { direction, handle, file_offset, memory }
    }

    /// Returns whether the bytes in the file are whole units of this size.
    pub(super) fn is_aligned(&self, unit: u64) -> bool {
        [self.memory.bytes as u64, self.file_offset as u64].iter().all(|number| number.is_multiple_of(unit))
    }

    fn start(&self) -> FileOutcome<u64> {
        let RequestedMemory { base, offset, .. } = self.memory;
        u64::try_from(offset).ok().and_then(|skip| base.checked_add(skip)).ok_or(INVALID_VALUE)
    }

    /// The bytes of memory that the request is about, in whatever state its handle is.
    pub(super) fn used(&self) -> FileOutcome<Access> {
        Ok(Access::line(self.start()?, self.memory.bytes, self.direction == Direction::Read))
    }
}

impl DriverState {
    /// Checks a request on the calling thread.
    pub(super) fn transfer(&mut self, request: Request) -> FileOutcome<Transfer> {
        let current = self.current().map_err(|_| INVALID_CONTEXT_ERROR)?;
        let transfer = self.transfer_on(request)?;
        match device_of(self, transfer.used.start, request.memory.bytes)? {
            Some(device) if device != current => Err(CUDA_CONTEXT_MISMATCH),
            _ => Ok(transfer),
        }
    }

    /// Checks a request on any thread.
    pub(super) fn transfer_on(&mut self, request: Request) -> FileOutcome<Transfer> {
        opened(self)?;
        let Request { direction, handle, file_offset, memory: RequestedMemory { base, bytes, .. } } = request;
        let file = self.cufile.handles.get(&handle).map(Arc::clone).ok_or(HANDLE_NOT_REGISTERED)?;
        let used = request.used()?;
        if base == 0 || file_offset < 0 || file_offset.checked_add_unsigned(bytes as u64).is_none() {
            return Err(INVALID_VALUE);
        }
        let registered = self.cufile.buffers.get(&base);
        if registered.is_some_and(|len| (used.start - base).saturating_add(bytes as u64) > *len as u64) {
            return Err(INVALID_MAPPING_RANGE);
        }
        let device = device_of(self, used.start, bytes)?;
        let unregistered = registered.is_none();
        let located = self.locate(Side::Either(used.start), Shape::line(bytes), used.writes);
        let range = located.map_err(|_| CUDA_POINTER_INVALID)?.range;
        if [file_offset as u64, bytes as u64, used.start].iter().any(|number| number % ALIGNMENT != 0) {
            self.call_log.count("unaligned_io");
        }
        if unregistered {
            self.call_log.count("unregistered_io");
        }
        let key = self.handle();
        let mut rng = self.rng(key);
        let delay = Duration::from_micros(rng.below(self.config.delay_us + 1));
        Ok(Transfer { direction, file, range, device, bytes, file_offset, used, rng, delay })
    }

    /// Adds a synchronous transfer to the race detector.
    pub(super) fn begin_transfer(&mut self, label: &'static str, used: Access) -> Point {
        let point = Point { stream: StreamId(self.handle()), seq: 1 };
        let entry = TrackedOp { point, label, uses: vec![used], clock: Clock::default(), over: false };
        let found = self.order.begin(entry);
        self.violations(found);
        point
    }
}

impl Transfer {
    /// Moves the bytes after a short delay, without the lock. Returns their number, or an errno.
    pub(super) fn run(mut self) -> Result<usize, i32> {
        std::thread::sleep(self.delay);
        let limit = {
            let mut state = lock();
            if !self.file.is_same() {
                state.call_log.violation(format!("lifetime: descriptor {} was closed while registered", self.file.fd));
            }
            state.call_log.call(self.direction.short()).map_or(self.bytes, |most| most.max(0) as usize).min(self.bytes)
        };
        let mut done = 0;
        while done < limit {
            let pages = 1 + self.rng.below(PIECE_PAGES_MAX) as usize;
            match self.piece(done, (pages * page_bytes()).min(limit - done)) {
                Ok(0) => break,
                Ok(moved) => done += moved,
                Err(libc::EINTR) => (),
                Err(error) => return Err(error),
            }
        }
        lock().cufile.statistics.count(self.direction, self.device, done, self.file.is_copied);
        Ok(done)
    }

    fn piece(&self, from: usize, bytes: usize) -> Result<usize, i32> {
        let memory = self.range.part(from);
        let offset = self.file_offset + from as i64;
        let numbers = [memory.addr() as u64, offset as u64, bytes as u64];
        let aligned = numbers.iter().all(|number| number % ALIGNMENT == 0);
        let fd = if aligned { self.file.fd } else { self.file.unaligned() };
        match self.call(fd, memory, offset, bytes) {
            // Some devices want more than a page.
            Err(libc::EINVAL) if aligned => self.call(self.file.unaligned(), memory, offset, bytes),
            moved => moved,
        }
    }

    fn call(&self, fd: RawFd, memory: *mut u8, offset: i64, bytes: usize) -> Result<usize, i32> {
        // SAFETY: the range was checked against its allocation, and keeps that allocation.
        let moved = unsafe {
            match self.direction {
                Direction::Read => libc::pread(fd, memory.cast(), bytes, offset),
                Direction::Write => libc::pwrite(fd, memory.cast(), bytes, offset),
            }
        };
        usize::try_from(moved).map_err(|_| std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
    }
}
