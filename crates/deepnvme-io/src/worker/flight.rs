//! One block or sync in flight, and the table of a worker's flights.

use std::path::PathBuf;
use std::time::Duration;

use deepnvme_mem::Slot;

use super::verdict::{self, Attempt, Headway, Verdict};
use super::{RETRIES_AT_ONCE, RETRIES_MAX, RETRY_PAUSE};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::GpuSlice;
use crate::op::{Direction, Errno, Op, OpKind, Pieces, Token};
use crate::request::WorkGuard;
use crate::split::{Block, IoMode, Route};
use crate::sync::{Instant, thread};

#[derive(Debug)]
pub(super) enum Task {
    Block {
        block: Block,
        /// The block's mode, or buffered after the file refused a direct transfer.
        mode: IoMode,
        /// The initial offset of the op in its part file.
        base: u64,
        step_bytes: usize,
    },
    Sync {
        path: PathBuf,
    },
}

#[derive(Debug)]
pub(super) struct Flight {
    pub(super) guard: WorkGuard,
    pub(super) task: Task,
    pub(super) slot: Option<Slot>,
    pub(super) started: Instant,
    /// When the current op was submitted. Later than `started` if it is a continuation or a retry.
    pub(super) submitted: Instant,
    /// The number of ops in flight at its start, including itself.
    pub(super) in_flight: u32,
    headway: Headway,
}

/// A bounced read whose bytes are in its bounce buffer.
#[derive(Debug)]
pub(super) struct Landed {
    pub(super) flight: Flight,
    /// Time from submission to completion.
    pub(super) took: Duration,
}

impl Flight {
    pub(super) fn sync(guard: WorkGuard, path: PathBuf) -> Self {
        Self::new(guard, Task::Sync { path }, None)
    }

    pub(super) fn block(guard: WorkGuard, block: Block, slot: Option<Slot>) -> Self {
        let mode = block.mode;
        Self::new(guard, Task::Block { block, mode, base: 0, step_bytes: 1 }, slot)
    }

    /// Starts the clock, with this many ops in flight.
    pub(super) fn start(&mut self, in_flight: u32) {
        let now = Instant::now();
        (self.started, self.submitted, self.in_flight) = (now, now, in_flight);
    }

    fn new(guard: WorkGuard, task: Task, slot: Option<Slot>) -> Self {
        let (now, headway) = (Instant::now(), Headway { reached: 0, retries: 0 });
        Self { guard, task, slot, started: now, submitted: now, in_flight: 1, headway }
    }

    /// Fills the bounce buffer of a write from host memory. Returns the slices on GPUs.
    pub(super) fn fill(&mut self) -> Result<Vec<GpuSlice>> {
        match (&self.task, &mut self.slot) {
            (Task::Block { block, .. }, Some(slot)) if self.guard.request().plan.direction() == Direction::Write => {
                self.guard.request().copy(block, slot)
            }
            _ => Ok(Vec::new()),
        }
    }

    /// Returns the block's op, with an unset token. The bounce buffer of a write is full.
    pub(super) fn first_op(&mut self) -> Result<Op> {
        let Task::Block { block, mode, base, step_bytes } = &mut self.task else {
            return Err(Error::new(ErrorKind::Io, "read", "a sync has no blocks"));
        };
        let file = self.guard.request().file(block);
        let (part, offset) = file.part_at(block.io.start);
        *base = offset;
        match part.alignment() {
            Some(alignment) if *mode == IoMode::Direct => {
                *step_bytes = alignment.offset.max(alignment.memory).bytes() as usize;
            }
            _ => *mode = IoMode::Buffered,
        }
        let direction = self.guard.request().plan.direction();
        let pieces = match &self.slot {
            None => self.guard.request().pieces(block)?,
            Some(slot) => {
                let io_bytes = (block.io.end - block.io.start) as usize;
                Pieces::from_iter([slot.region().slice(0..io_bytes)])
            }
        };
        let kind = match direction {
            Direction::Read => OpKind::Read,
            Direction::Write => OpKind::Write,
        };
        let cufile = if block.route == Route::CuFile { part.cufile_registration() } else { None };
        Ok(Op { token: Token(0), kind, file: part.descriptor(*mode)?, offset, pieces, cufile })
    }

    /// Classifies a completion of this block's op.
    pub(super) fn judge(&mut self, op: &Op, result: Result<usize, Errno>) -> Verdict {
        let Task::Block { block, mode, base, step_bytes } = &self.task else {
            return Verdict::Done;
        };
        let direction = self.guard.request().plan.direction();
        let attempt = Attempt {
            before: (op.offset - base) as usize,
            needed: (block.range.end - block.io.start) as usize,
            step_bytes: *step_bytes,
            is_direct: *mode == IoMode::Direct,
            is_read: direction == Direction::Read,
            operation: direction.name(),
        };
        match verdict::judge(&mut self.headway, attempt, result) {
            Verdict::Retry => {
                self.pause_if_late();
                Verdict::Retry
            }
            // Two consecutive short transfers can end at the same offset, so only the file's length proves its end.
            Verdict::EndOfFile if self.file_goes_on() && self.headway.retries < RETRIES_MAX => {
                self.headway.retries += 1;
                self.pause_if_late();
                Verdict::Retry
            }
            Verdict::Fail(error) => {
                let at = block.io.start + self.headway.reached as u64;
                let file = self.guard.request().file(block);
                let path = if file.parts().len() == 1 { file.path() } else { file.part_at(at).0.path() };
                Verdict::Fail(error.at_path(path).at_offset(at))
            }
            other => other,
        }
    }

    /// Returns whether the file has bytes beyond the ones this block has reached.
    fn file_goes_on(&self) -> bool {
        let Task::Block { block, base, .. } = &self.task else {
            return false;
        };
        let file = self.guard.request().file(block);
        let (part, _) = file.part_at(block.io.start);
        part.len().is_ok_and(|bytes| bytes > base + self.headway.reached as u64)
    }

    /// Returns whether to retry a refused sync.
    pub(super) fn may_retry(&mut self, errno: Errno) -> bool {
        self.headway.retries += 1;
        let may = matches!(errno, Errno::INTR | Errno::AGAIN) && self.headway.retries <= RETRIES_MAX;
        if may {
            self.pause_if_late();
        }
        may
    }

    fn pause_if_late(&self) {
        if self.headway.retries > RETRIES_AT_ONCE {
            thread::sleep(RETRY_PAUSE);
        }
    }

    /// Turns a refused direct op into a buffered one. Fails if direct I/O is required.
    pub(super) fn go_buffered(&mut self, mut op: Op, reason: &str) -> Result<Op> {
        let Task::Block { block, mode, step_bytes, .. } = &mut self.task else {
            return Ok(op);
        };
        let file = self.guard.request().file(block);
        let (part, _) = file.part_at(block.io.start);
        part.refuse_direct(reason).map_err(|error| error.at_offset(block.io.start))?;
        *mode = IoMode::Buffered;
        *step_bytes = 1;
        op.file = part.descriptor(IoMode::Buffered)?;
        Ok(op)
    }

    /// Returns whether cuFile moves it.
    pub(super) fn is_gds(&self) -> bool {
        matches!(&self.task, Task::Block { block, .. } if block.route == Route::CuFile)
    }

    /// Returns whether its bytes are in a bounce buffer and must be copied to the caller's memory.
    pub(super) fn is_bounced_read(&self) -> bool {
        self.slot.is_some() && self.guard.request().plan.direction() == Direction::Read
    }

    /// Copies the bytes of a bounced read to the caller's host memory. Returns the slices on GPUs.
    pub(super) fn copy_home(&mut self) -> Result<Vec<GpuSlice>> {
        match (&self.task, &mut self.slot) {
            (Task::Block { block, .. }, Some(slot)) => self.guard.request().copy(block, slot),
            _ => Ok(Vec::new()),
        }
    }

    /// Adds the file and the offset to an error.
    pub(super) fn named(&self, error: Error) -> Error {
        let Task::Block { block, .. } = &self.task else { return error };
        error.at_path(self.guard.request().file(block).path()).at_offset(block.range.start)
    }

    /// Returns the error for a range beyond the end of the file, with the number of bytes available.
    pub(super) fn end_of_file(&self) -> Error {
        let Task::Block { block, .. } = &self.task else {
            return Error::new(ErrorKind::UnexpectedEof, "read", "");
        };
        let file = self.guard.request().file(block);
        let reached = block.io.start + self.headway.reached as u64;
        let file_bytes = file.len().unwrap_or(reached);
        let segments = &self.guard.request().plan.segments()[block.segments.clone()];
        let missing = segments.iter().find(|segment| segment.offset + segment.len > file_bytes);
        let (offset, bytes) = missing.or(segments.first()).map_or((reached, 0), |s| (s.offset, s.len));
        let there = file_bytes.saturating_sub(offset).min(bytes);
        let detail = format!(
            "the file ends too early: it has {file_bytes} bytes; {bytes} were asked for, of which {there} are there"
        );
        let error = Error::new(ErrorKind::UnexpectedEof, "read", detail);
        error.at_path(file.path()).at_offset(offset).after_bytes(there)
    }
}

/// A worker's flights, by token.
#[derive(Debug)]
pub(super) struct Flights {
    places: Vec<Option<Flight>>,
    free: Vec<u32>,
}

impl Flights {
    pub(super) fn new(capacity: u32) -> Self {
        Self { places: (0..capacity).map(|_| None).collect(), free: (0..capacity).rev().collect() }
    }

    pub(super) fn len(&self) -> u32 {
        (self.places.len() - self.free.len()) as u32
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Inserts a flight. The caller checks for room: a worker never has more flights than its queue depth.
    pub(super) fn insert(&mut self, flight: Flight) -> Token {
        let place = self.free.pop().unwrap_or_else(|| {
            self.places.push(None);
            self.places.len() as u32 - 1
        });
        self.places[place as usize] = Some(flight);
        Token(u64::from(place))
    }

    pub(super) fn get_mut(&mut self, token: Token) -> Option<&mut Flight> {
        self.places.get_mut(token.0 as usize)?.as_mut()
    }

    pub(super) fn remove(&mut self, token: Token) -> Option<Flight> {
        let flight = self.places.get_mut(token.0 as usize)?.take()?;
        self.free.push(token.0 as u32);
        Some(flight)
    }

    pub(super) fn drain(&mut self) -> Vec<Flight> {
        let flights = self.places.iter_mut().filter_map(Option::take).collect();
        self.free = (0..self.places.len() as u32).rev().collect();
        flights
    }
}
