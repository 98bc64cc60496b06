//! One transfer: checked when requested, then moved without the lock.

use std::sync::Arc;
use std::time::Duration;

use crate::abi::Handle;
use crate::abi::cufile::{
    CUDA_CONTEXT_MISMATCH, CUDA_POINTER_INVALID, FileOutcome, HANDLE_NOT_REGISTERED, INVALID_CONTEXT_ERROR,
    INVALID_MAPPING_RANGE, INVALID_VALUE,
};
use crate::access::{Access, Shape};
use crate::cufile::registered::device_of;
use crate::cufile::session::check_open;
use crate::operations::locate::Side;
use crate::state::clock::{Clock, Point, StreamId};
use crate::state::cufile::transfer::{ALIGNMENT, Direction, Transfer};
use crate::state::race_detector::TrackedOp;
use crate::state::{DriverState, lock};

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
        check_open(self)?;
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
        let found = self.races.begin(entry);
        self.record_violations(found);
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
            state
                .call_log
                .call(self.direction.short_fault())
                .map_or(self.bytes, |most| most.max(0) as usize)
                .min(self.bytes)
        };
        let done = self.move_bytes(limit)?;
        lock().cufile.statistics.count(self.direction, self.device, done, self.file.is_copied);
        Ok(done)
    }
}
