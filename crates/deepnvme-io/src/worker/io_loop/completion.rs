//! Handles completions of ops and of GPU copies.

use super::super::gpu_stage::CopyingBlock;
use super::super::in_flight::{CompletedBlock, InFlightOp, Task};
use super::super::outcome::Outcome;
use super::IoLoop;
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::op::{Completion, Errno, Op, Token};
use crate::request::Request;
use crate::split::Block;
use crate::stats::WorkerStats;
use crate::sync::lock;
use crate::trace::{CompletedOp, DataPath};

impl<B: Backend> IoLoop<B> {
    /// Handles one completion.
    pub(crate) fn handle_completion(&mut self, completion: Completion) -> Result<()> {
        let Completion { op, result } = completion;
        let token = op.token;
        if self.accounts.tracer.is_on() {
            self.record(&op, result);
        }
        match self.in_flight.get_mut(token).map(|entry| &entry.task) {
            None => Ok(()),
            Some(Task::Block { .. }) => self.complete_block_op(op, result),
            Some(Task::Sync { .. }) => self.complete_sync(op, result),
        }
    }

    /// Adds a completed op to recordings.
    fn record(&mut self, op: &Op, result: Result<usize, Errno>) {
        let Some(entry) = self.in_flight.get_mut(op.token) else { return };
        match &entry.task {
            Task::Sync { path } => self.accounts.tracer.sync(entry.submitted(), path, result.is_err()),
            Task::Block { block, mode, .. } => {
                let (file, direction) = (entry.guard.request().file(block), entry.guard.request().plan.direction());
                let (part, _) = file.part_at(block.io.start);
                let (data_path, bytes) = (DataPath::of(*mode, block.route), result.ok().map(|bytes| bytes as u64));
                let completed = CompletedOp { direction, file: part.path(), offset: op.offset, bytes, data_path };
                self.accounts.tracer.op(entry.submitted(), &completed);
            }
        }
    }

    /// Submits an op again.
    fn submit_again(&mut self, op: Op) -> Result<()> {
        if let Some(entry) = self.in_flight.get_mut(op.token) {
            entry.submit_again();
        }
        self.submit(op)
    }

    fn complete_sync(&mut self, op: Op, result: Result<usize, Errno>) -> Result<()> {
        let token = op.token;
        let Some(entry) = self.in_flight.get_mut(token) else { return Ok(()) };
        let error = match result {
            Ok(_) => None,
            Err(errno) if entry.may_retry(errno) => {
                WorkerStats::count(&self.accounts.stats.counters.retries, 1);
                return self.submit_again(op);
            }
            Err(errno) => Some(Error::os("sync", errno)),
        };
        drop(op);
        let Some(InFlightOp { guard, task, .. }) = self.in_flight.remove(token) else { return Ok(()) };
        guard.end(match (error, task) {
            (None, _) => Ok(0),
            (Some(error), Task::Sync { path }) => Err(error.at_path(path)),
            (Some(error), Task::Block { .. }) => Err(error),
        });
        Ok(())
    }

    fn complete_block_op(&mut self, op: Op, result: Result<usize, Errno>) -> Result<()> {
        let counters = &self.accounts.stats.counters;
        let token = op.token;
        let Some(entry) = self.in_flight.get_mut(token) else { return Ok(()) };
        let error = match entry.classify(&op, result) {
            Outcome::Done => None,
            Outcome::Continue { bytes } => {
                WorkerStats::count(&counters.short_ops, 1);
                let mut op = op;
                op.advance(bytes);
                return self.submit_again(op);
            }
            Outcome::Retry => {
                WorkerStats::count(&counters.retries, 1);
                return self.submit_again(op);
            }
            Outcome::FallBack(_) if entry.uses_gds() => return self.fall_back_to_bounce(token, refusal(&op)),
            Outcome::FallBack(reason) => match entry.fall_back_to_buffered(op, &reason) {
                Ok(op) => {
                    lock(&self.accounts.stats.buffered_reason).get_or_insert(reason);
                    return self.submit_again(op);
                }
                Err(error) => return self.complete_block(token, Some(error)),
            },
            Outcome::EndOfFile => Some(entry.end_of_file_error()),
            Outcome::Fail(error) if entry.uses_gds() => {
                Some(refusal(&op).map_or(error.clone(), |reason| error.because(reason)))
            }
            Outcome::Fail(error) => Some(error),
        };
        drop(op);
        self.complete_block(token, error)
    }

    /// Queues a block that cuFile has refused, to go through bounce buffers. Later blocks of the same file go there at
    /// once.
    fn fall_back_to_bounce(&mut self, token: Token, reason: Option<String>) -> Result<()> {
        let Some(entry) = self.in_flight.remove(token) else { return Ok(()) };
        let reason = reason.unwrap_or_else(|| "cuFile has refused a transfer".into());
        let InFlightOp { guard, task: Task::Block { block, .. }, .. } = entry else { return Ok(()) };
        let file = guard.request().file(&block);
        file.part_at(block.io.start).0.refuse_gds(&reason);
        match self.gds.fall_back(&reason, &self.accounts.stats) {
            Ok(()) => self.gds.queue_for_bounce(guard, &block, self.bounce.buffer_bytes()),
            Err(error) => guard.end(Err(error.at_path(file.path()).at_offset(block.io.start))),
        }
        Ok(())
    }

    /// Removes a completed block. A bounced read is copied later, by [`IoLoop::copy_completed_read`], so that other
    /// blocks can be submitted first.
    fn complete_block(&mut self, token: Token, error: Option<Error>) -> Result<()> {
        let Some(block) = self.in_flight.remove(token) else { return Ok(()) };
        let buffer = block.bounced_read();
        let is_bounced_read = buffer.is_some();
        if let Some(buffer) = buffer {
            self.bounce.read_ended(buffer);
        }
        let completed = CompletedBlock::now(block);
        if error.is_none() {
            // The latency of a failed op says nothing about the device.
            self.window.learn(completed.block.depth_at_start(), completed.latency);
        }
        match error {
            Some(error) => completed.block.guard.end(Err(error)),
            None if is_bounced_read => self.bounce.completed_reads.push_back(completed),
            None => self.end_block(completed),
        }
        Ok(())
    }

    /// Copies one completed bounced read to the caller's memory, or starts the copy to a GPU. Its bounce buffer is free
    /// after the copy. Returns whether there was such a read. Submitted ops go to the kernel first, so that the device
    /// works meanwhile.
    pub(crate) fn copy_completed_read(&mut self) -> Result<bool> {
        if !self.has_completed_reads() {
            return Ok(false);
        }
        self.flush()?;
        if let Some(mut completed) = self.bounce.completed_reads.pop_front() {
            match completed.block.copy_to_caller() {
                Ok(slices) if slices.is_empty() => self.end_block(completed),
                Ok(slices) => self.copy(CopyingBlock::Read(completed), slices),
                Err(error) => completed.block.guard.end(Err(error)),
            }
        }
        Ok(true)
    }

    /// Continues the blocks whose GPU copies are complete. Returns whether there were any.
    pub(crate) fn handle_gpu_copies(&mut self) -> Result<bool> {
        let completed = self.gpu.take_completed(&self.accounts.tracer);
        let any = !completed.is_empty();
        for (number, result) in completed {
            let Some(block) = self.gpu.remove(number) else { continue };
            match (result, block) {
                (Ok(()), CopyingBlock::Write(block)) => self.submit_block(block)?,
                (Ok(()), CopyingBlock::Read(completed)) => self.end_block(completed),
                (Err(error), block) => block.fail(error),
            }
        }
        Ok(any)
    }

    /// Frees the bounce buffer and ends the work item.
    fn end_block(&self, completed: CompletedBlock) {
        let CompletedBlock { block: InFlightOp { guard, task, buffer, .. }, latency } = completed;
        drop(buffer);
        let Task::Block { block, mode, .. } = task else { return };
        let bytes = wanted_bytes(guard.request(), &block);
        self.accounts.stats.block_done(guard.request().plan.direction(), mode, block.route, bytes, latency);
        guard.end(Ok(bytes));
    }
}

/// Returns the bytes of the block that the caller requested, without gaps between them.
fn wanted_bytes(request: &Request, block: &Block) -> u64 {
    request.plan.segments()[block.segments.clone()]
        .iter()
        .map(|segment| (segment.offset + segment.len).min(block.range.end) - segment.offset.max(block.range.start))
        .sum()
}

/// Returns why cuFile did not perform an op.
fn refusal(op: &Op) -> Option<String> {
    op.cufile.as_ref()?.refusal()
}
