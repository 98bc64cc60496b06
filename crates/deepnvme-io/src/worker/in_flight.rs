//! A block or sync in flight, and the table of a worker's ops in flight.

use std::path::PathBuf;
use std::time::Duration;

use deepnvme_mem::Slot;

use super::outcome::{self, Attempt, BlockProgress, Outcome, RETRIES_MAX};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::GpuSlice;
use crate::op::{Direction, Errno, Iovecs, Op, OpKind, Token};
use crate::request::WorkGuard;
use crate::split::{Block, IoMode, Route};
use crate::sync::{Instant, thread};

/// How many of the [`RETRIES_MAX`] retries run immediately. [`RETRY_PAUSE`] precedes each later one.
pub const RETRIES_AT_ONCE: u32 = 10;
/// Pause before a late retry.
pub const RETRY_PAUSE: Duration = Duration::from_millis(1);

/// The work of an op in flight.
#[derive(Debug)]
pub(super) enum Task {
    Block {
        block: Block,
        /// The block's mode, or buffered after the file refused a direct transfer.
        mode: IoMode,
        /// The initial offset of the op in its part file.
        base: u64,
        /// The alignment of a continuation's start.
        step_bytes: usize,
    },
    Sync {
        path: PathBuf,
    },
}

/// A block or sync in flight. Its continuations and retries belong to it.
#[derive(Debug)]
pub(super) struct InFlightOp {
    pub(super) guard: WorkGuard,
    pub(super) task: Task,
    /// The bounce buffer of a block that needs one.
    pub(super) buffer: Option<Slot>,
    timing: Timing,
    progress: BlockProgress,
}

/// When a block or sync started, and the number of ops in flight then.
#[derive(Clone, Copy, Debug)]
struct Timing {
    started: Instant,
    /// When the current op was submitted. Later than `started` if it is a continuation or a retry.
    submitted: Instant,
    /// The number of ops in flight at its start, including itself.
    depth_at_start: u32,
}

impl Timing {
    fn now(depth_at_start: u32) -> Self {
        let now = Instant::now();
        Self { started: now, submitted: now, depth_at_start }
    }
}

/// A block whose ops are complete. The bytes of a bounced read are still in its bounce buffer.
#[derive(Debug)]
pub(super) struct CompletedBlock {
    pub(super) block: InFlightOp,
    /// Time from submission to completion.
    pub(super) latency: Duration,
}

impl CompletedBlock {
    /// Creates the record of a block that completes now.
    pub(super) fn now(block: InFlightOp) -> Self {
        Self { latency: block.timing.started.elapsed(), block }
    }
}

impl InFlightOp {
    pub(super) fn sync(guard: WorkGuard, path: PathBuf) -> Self {
        Self::new(guard, Task::Sync { path }, None)
    }

    pub(super) fn block(guard: WorkGuard, block: Block, buffer: Option<Slot>) -> Self {
        let mode = block.mode;
        Self::new(guard, Task::Block { block, mode, base: 0, step_bytes: 1 }, buffer)
    }

    /// Starts the clock, with this many ops in flight.
    pub(super) fn start(&mut self, depth_at_start: u32) {
        self.timing = Timing::now(depth_at_start);
    }

    /// Notes that the current op is submitted, as a continuation or a retry.
    pub(super) fn submit_again(&mut self) {
        self.timing.submitted = Instant::now();
    }

    /// Returns when the current op was submitted.
    pub(super) fn submitted(&self) -> Instant {
        self.timing.submitted
    }

    /// Returns the number of ops in flight at its start, including itself.
    pub(super) fn depth_at_start(&self) -> u32 {
        self.timing.depth_at_start
    }

    fn new(guard: WorkGuard, task: Task, buffer: Option<Slot>) -> Self {
        let progress = BlockProgress { reached: 0, retries: 0 };
        Self { guard, task, buffer, timing: Timing::now(1), progress }
    }

    /// Fills the bounce buffer of a write from host memory. Returns the slices on GPUs.
    pub(super) fn fill_buffer(&mut self) -> Result<Vec<GpuSlice>> {
        match (&self.task, &mut self.buffer) {
            (Task::Block { block, .. }, Some(buffer)) if self.guard.request().plan.direction() == Direction::Write => {
                self.guard.request().copy(block, buffer)
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
            _ if *mode == IoMode::Cached => {}
            _ => *mode = IoMode::Buffered,
        }
        let direction = self.guard.request().plan.direction();
        let iovecs = match &self.buffer {
            None => self.guard.request().iovecs(block)?,
            Some(buffer) => {
                let io_bytes = (block.io.end - block.io.start) as usize;
                Iovecs::from_iter([buffer.region().slice(0..io_bytes)])
            }
        };
        let kind = match direction {
            Direction::Read => OpKind::Read,
            Direction::Write => OpKind::Write,
        };
        let cufile = if block.route == Route::Gds { part.cufile_registration() } else { None };
        Ok(Op { token: Token(0), kind, file: part.descriptor(*mode)?, offset, iovecs, cufile })
    }

    /// Classifies a completion of this block's op.
    pub(super) fn classify(&mut self, op: &Op, result: Result<usize, Errno>) -> Outcome {
        let Task::Block { block, mode, base, step_bytes } = &self.task else {
            return Outcome::Done;
        };
        let attempt = Attempt {
            before: (op.offset - base) as usize,
            needed: (block.range.end - block.io.start) as usize,
            step_bytes: *step_bytes,
            is_direct: *mode == IoMode::Direct,
            direction: self.guard.request().plan.direction(),
        };
        match outcome::classify(&mut self.progress, attempt, result) {
            Outcome::Retry => {
                self.pause_before_retry();
                Outcome::Retry
            }
            // Two consecutive short transfers can end at the same offset, so only the file's length proves its end.
            Outcome::EndOfFile if self.file_has_more() && self.progress.retries < RETRIES_MAX => {
                self.progress.retries += 1;
                self.pause_before_retry();
                Outcome::Retry
            }
            Outcome::Fail(error) => {
                let at = block.io.start + self.progress.reached as u64;
                let request = self.guard.request();
                let file = request.file(block);
                let path = if file.parts().len() == 1 { file.path() } else { file.part_at(at).0.path() };
                Outcome::Fail(error.at_path(path).at_offset(at).needing(request.plan.bytes_total()))
            }
            other => other,
        }
    }

    /// Returns whether the file has bytes beyond the ones this block has reached.
    fn file_has_more(&self) -> bool {
        let Task::Block { block, base, .. } = &self.task else {
            return false;
        };
        let file = self.guard.request().file(block);
        let (part, _) = file.part_at(block.io.start);
        part.len().is_ok_and(|bytes| bytes > base + self.progress.reached as u64)
    }

    /// Counts a refusal of a sync, and returns whether to retry. Pauses before a late retry.
    pub(super) fn may_retry(&mut self, errno: Errno) -> bool {
        self.progress.retries += 1;
        let may = matches!(errno, Errno::INTR | Errno::AGAIN) && self.progress.retries <= RETRIES_MAX;
        if may {
            self.pause_before_retry();
        }
        may
    }

    fn pause_before_retry(&self) {
        if self.progress.retries > RETRIES_AT_ONCE {
            thread::sleep(RETRY_PAUSE);
        }
    }

    /// Turns a refused direct op into a buffered one. Fails if direct I/O is required.
    pub(super) fn fall_back_to_buffered(&mut self, mut op: Op, reason: &str) -> Result<Op> {
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
    pub(super) fn uses_gds(&self) -> bool {
        matches!(&self.task, Task::Block { block, .. } if block.route == Route::Gds)
    }

    /// Returns the bounce buffer of a read. Its bytes are still to be copied to the caller's memory.
    pub(super) fn bounced_read(&self) -> Option<&Slot> {
        self.buffer.as_ref().filter(|_| self.guard.request().plan.direction() == Direction::Read)
    }

    /// Copies the bytes of a bounced read to the caller's host memory. Returns the slices on GPUs.
    pub(super) fn copy_to_caller(&mut self) -> Result<Vec<GpuSlice>> {
        match (&self.task, &mut self.buffer) {
            (Task::Block { block, .. }, Some(buffer)) => self.guard.request().copy(block, buffer),
            _ => Ok(Vec::new()),
        }
    }

    /// Adds the file and the offset to an error.
    pub(super) fn with_place(&self, error: Error) -> Error {
        let Task::Block { block, .. } = &self.task else { return error };
        error.at_path(self.guard.request().file(block).path()).at_offset(block.range.start)
    }

    /// Returns the error for a range beyond the end of the file, with the number of bytes available.
    pub(super) fn end_of_file_error(&self) -> Error {
        let Task::Block { block, .. } = &self.task else {
            return Error::new(ErrorKind::UnexpectedEof, "read", "");
        };
        let file = self.guard.request().file(block);
        if let Ok(Some((part, missing))) = file.short_part() {
            return Error::short_part(part, missing);
        }
        let reached = block.io.start + self.progress.reached as u64;
        let file_bytes = file.len().unwrap_or(reached);
        let segments = &self.guard.request().plan.segments()[block.segments.clone()];
        let missing = segments.iter().find(|segment| segment.offset + segment.len > file_bytes);
        let (offset, bytes) = missing.or(segments.first()).map_or((reached, 0), |s| (s.offset, s.len));
        Error::end_of_file("read", file_bytes, offset, bytes).at_path(file.path())
    }
}

/// A worker's ops in flight, by token.
#[derive(Debug)]
pub(super) struct InFlightTable {
    entries: Vec<Option<InFlightOp>>,
    free: Vec<u32>,
}

impl InFlightTable {
    pub(super) fn new(capacity: u32) -> Self {
        Self { entries: (0..capacity).map(|_| None).collect(), free: (0..capacity).rev().collect() }
    }

    pub(super) fn len(&self) -> u32 {
        (self.entries.len() - self.free.len()) as u32
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Inserts an op. The caller checks for room: a worker never has more ops than its queue depth.
    pub(super) fn insert(&mut self, op: InFlightOp) -> Token {
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() as u32 - 1
        });
        self.entries[index as usize] = Some(op);
        Token(u64::from(index))
    }

    pub(super) fn get_mut(&mut self, token: Token) -> Option<&mut InFlightOp> {
        self.entries.get_mut(token.0 as usize)?.as_mut()
    }

    pub(super) fn remove(&mut self, token: Token) -> Option<InFlightOp> {
        let op = self.entries.get_mut(token.0 as usize)?.take()?;
        self.free.push(token.0 as u32);
        Some(op)
    }

    pub(super) fn drain(&mut self) -> Vec<InFlightOp> {
        let ops = self.entries.iter_mut().filter_map(Option::take).collect();
        self.free = (0..self.entries.len() as u32).rev().collect();
        ops
    }
}
