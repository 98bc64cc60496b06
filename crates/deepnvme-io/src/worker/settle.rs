//! Handles completions.

use super::flight::{Flight, Landed, Task};
use super::mover::{Copying, Mover};
use super::verdict::Verdict;
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::gpu::{AsyncCopier, CompletedCopy};
use crate::op::{Completion, Errno, Op, Token};
use crate::request::Request;
use crate::split::Block;
use crate::stats::WorkerStats;
use crate::sync::Instant;
use crate::trace::{Copied, DataPath, Moved};

impl<B: Backend> Mover<B> {
    /// Handles one completion.
    pub(super) fn settle(&mut self, completion: Completion) -> Result<()> {
        let Completion { op, result } = completion;
        let token = op.token;
        if self.tape.is_on() {
            self.note(&op, result);
        }
        match self.flights.get_mut(token).map(|flight| &flight.task) {
            None => Ok(()),
            Some(Task::Block { .. }) => self.settle_block(op, result),
            Some(Task::Sync { .. }) => self.settle_sync(op, result),
        }
    }

    /// Adds a completed op to recordings.
    fn note(&mut self, op: &Op, result: Result<usize, Errno>) {
        let Some(flight) = self.flights.get_mut(op.token) else { return };
        match &flight.task {
            Task::Sync { path } => self.tape.sync(flight.submitted, path, result.is_err()),
            Task::Block { block, mode, .. } => {
                let (file, direction) = (flight.guard.request().file(block), flight.guard.request().plan.direction());
                let (part, _) = file.part_at(block.io.start);
                let (data_path, bytes) = (DataPath::of(*mode, block.route), result.ok().map(|bytes| bytes as u64));
                let moved = Moved { direction, file: part.path(), offset: op.offset, bytes, data_path };
                self.tape.transfer(flight.submitted, &moved);
            }
        }
    }

    /// Submits an op again.
    fn submit_again(&mut self, op: Op) -> Result<()> {
        if let Some(flight) = self.flights.get_mut(op.token) {
            flight.submitted = Instant::now();
        }
        self.submit(op)
    }

    fn settle_sync(&mut self, op: Op, result: Result<usize, Errno>) -> Result<()> {
        let token = op.token;
        let Some(flight) = self.flights.get_mut(token) else { return Ok(()) };
        let error = match result {
            Ok(_) => None,
            Err(errno) if flight.may_retry(errno) => {
                WorkerStats::count(&self.stats.counters.retries, 1);
                return self.submit_again(op);
            }
            Err(errno) => Some(Error::os("sync", errno)),
        };
        drop(op);
        let Some(Flight { guard, task, .. }) = self.flights.remove(token) else { return Ok(()) };
        guard.end(match (error, task) {
            (None, _) => Ok(0),
            (Some(error), Task::Sync { path }) => Err(error.at_path(path)),
            (Some(error), Task::Block { .. }) => Err(error),
        });
        Ok(())
    }

    fn settle_block(&mut self, op: Op, result: Result<usize, Errno>) -> Result<()> {
        let counters = &self.stats.counters;
        let token = op.token;
        let Some(flight) = self.flights.get_mut(token) else { return Ok(()) };
        let error = match flight.judge(&op, result) {
            Verdict::Done => None,
            Verdict::Continue { bytes } => {
                WorkerStats::count(&counters.short_transfers, 1);
                let mut op = op;
                op.advance(bytes);
                return self.submit_again(op);
            }
            Verdict::Retry => {
                WorkerStats::count(&counters.retries, 1);
                return self.submit_again(op);
            }
            Verdict::GoBuffered(_) if flight.is_gds() => return self.go_by_slot(token),
            Verdict::GoBuffered(reason) => match flight.go_buffered(op, &reason) {
                Ok(op) => {
                    crate::sync::lock(&self.stats.buffered_reason).get_or_insert(reason);
                    return self.submit_again(op);
                }
                Err(error) => return self.land(token, Some(error)),
            },
            Verdict::EndOfFile => Some(flight.end_of_file()),
            Verdict::Fail(error) if flight.is_gds() => {
                let said = self.gds.as_ref().and_then(|setup| setup.gds.take_refusal());
                Some(said.map_or(error.clone(), |said| error.because(said)))
            }
            Verdict::Fail(error) => Some(error),
        };
        drop(op);
        self.land(token, error)
    }

    /// Sends a block that cuFile has refused through a bounce buffer, and later blocks of the same file.
    fn go_by_slot(&mut self, token: Token) -> Result<()> {
        let Some(flight) = self.flights.remove(token) else { return Ok(()) };
        let reason = self.gds.as_ref().and_then(|setup| setup.gds.take_refusal());
        let reason = reason.unwrap_or_else(|| "cuFile has refused a transfer".into());
        let Flight { guard, task: Task::Block { block, .. }, .. } = flight else { return Ok(()) };
        let file = guard.request().file(&block);
        file.part_at(block.io.start).0.refuse_gds(&reason);
        match self.do_without_gds(&reason) {
            Ok(()) => self.send_through_slots(guard, &block),
            Err(error) => guard.end(Err(error.at_path(file.path()).at_offset(block.io.start))),
        }
        Ok(())
    }

    /// Removes a completed flight. A bounced read is copied later, by [`Mover::unload`], so that other blocks can be
    /// submitted first.
    fn land(&mut self, token: Token, error: Option<Error>) -> Result<()> {
        let Some(flight) = self.flights.remove(token) else { return Ok(()) };
        self.bounced_reads -= usize::from(flight.is_bounced_read());
        let landed = Landed { took: flight.started.elapsed(), flight };
        self.window.learn(landed.flight.in_flight, landed.took);
        match error {
            Some(error) => landed.flight.guard.end(Err(error)),
            None if landed.flight.is_bounced_read() => self.landed.push_back(landed),
            None => self.finish(landed),
        }
        Ok(())
    }

    /// Copies one completed bounced read to the caller's memory, which frees its bounce buffer. Returns whether there
    /// was one. Submitted ops go to the kernel first, so that the device works meanwhile.
    pub(crate) fn unload(&mut self) -> Result<bool> {
        if self.landed.is_empty() {
            return Ok(false);
        }
        self.flush()?;
        if let Some(mut landed) = self.landed.pop_front() {
            match landed.flight.copy_home() {
                Ok(slices) if slices.is_empty() => self.finish(landed),
                Ok(slices) => self.copy(Copying::TransferMemory(landed), slices),
                Err(error) => landed.flight.guard.end(Err(error)),
            }
        }
        Ok(true)
    }

    /// Continues the blocks whose GPU copies are done. Returns whether there were any.
    pub(crate) fn settle_copies(&mut self) -> Result<bool> {
        let finished = self.copies.as_mut().map(AsyncCopier::take_completed).unwrap_or_default();
        let any = !finished.is_empty();
        for CompletedCopy { outcome, gpu, direction, bytes, start_ns, end_ns, .. } in &finished {
            let (gpu, direction, bytes, failed) = (*gpu, *direction, *bytes, outcome.is_err());
            self.tape.copy(Copied { gpu, direction, bytes, start_ns: *start_ns, end_ns: *end_ns, failed });
        }
        for CompletedCopy { number, outcome, .. } in finished {
            let Some(copying) = self.copying.remove(&number) else { continue };
            match (outcome, copying) {
                (Ok(()), Copying::Out(flight)) => self.launch(flight)?,
                (Ok(()), Copying::TransferMemory(landed)) => self.finish(landed),
                (Err(error), copying) => {
                    let flight = copying.into_flight();
                    let error = flight.named(error);
                    flight.guard.end(Err(error));
                }
            }
        }
        Ok(any)
    }

    /// Sleeps until a copy to or from a GPU is done.
    pub(crate) fn wait_for_copy(&self) {
        if let Some(copies) = &self.copies {
            copies.wait_for_one();
        }
    }

    /// Returns the bounce buffer and ends the claim.
    fn finish(&self, landed: Landed) {
        let Landed { flight: Flight { guard, task, slot, .. }, took } = landed;
        drop(slot);
        let Task::Block { block, mode, .. } = task else { return };
        let bytes = wanted_bytes(guard.request(), &block);
        self.stats.block_done(guard.request().plan.direction(), mode, block.route, bytes, took);
        guard.end(Ok(bytes));
    }
}

/// Returns the bytes of the block that belong to the caller, without gaps that were read.
fn wanted_bytes(request: &Request, block: &Block) -> u64 {
    request.plan.segments()[block.segments.clone()]
        .iter()
        .map(|segment| (segment.offset + segment.len).min(block.range.end) - segment.offset.max(block.range.start))
        .sum()
}
