//! What happens to an op that has come home.

use super::flight::{Flight, Task};
use super::mover::Mover;
use super::verdict::Verdict;
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::job::Job;
use crate::op::{Completion, Errno, Op, Token};
use crate::split::Block;
use crate::stats::WorkerStats;

impl<B: Backend> Mover<B> {
    /// Acts on one completion.
    pub(super) fn settle(&mut self, completion: Completion) -> Result<()> {
        let Completion { op, result } = completion;
        let token = op.token;
        match self.flights.get_mut(token).map(|flight| &flight.task) {
            None => Ok(()),
            Some(Task::Block { .. }) => self.settle_block(op, result),
            Some(Task::Sync { .. }) => self.settle_sync(op, result),
        }
    }

    fn settle_sync(&mut self, op: Op, result: Result<usize, Errno>) -> Result<()> {
        let token = op.token;
        let Some(flight) = self.flights.get_mut(token) else { return Ok(()) };
        let error = match result {
            Ok(_) => None,
            Err(errno) if flight.may_retry(errno) => {
                WorkerStats::count(&self.stats.counters.retries, 1);
                return self.submit(op);
            }
            Err(errno) => Some(Error::os("sync", errno)),
        };
        drop(op);
        let Some(Flight { claim, task, .. }) = self.flights.remove(token) else { return Ok(()) };
        claim.end(match (error, task) {
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
                return self.submit(op);
            }
            Verdict::Retry => {
                WorkerStats::count(&counters.retries, 1);
                return self.submit(op);
            }
            Verdict::GoBuffered(reason) => match flight.go_buffered(op, &reason) {
                Ok(op) => {
                    crate::sync::lock(&self.stats.buffered_reason).get_or_insert(reason);
                    return self.submit(op);
                }
                Err(error) => return self.land(token, Some(error)),
            },
            Verdict::EndOfFile => Some(flight.end_of_file()),
            Verdict::Fail(error) => Some(error),
        };
        drop(op);
        self.land(token, error)
    }

    /// Ends a flight whose op has come home: copies what was read, gives the slot back, tells the job.
    fn land(&mut self, token: Token, error: Option<Error>) -> Result<()> {
        let Some(mut flight) = self.flights.remove(token) else { return Ok(()) };
        let error = error.or_else(|| flight.copy_home().err());
        let Flight { claim, task, started, slot, .. } = flight;
        drop(slot);
        let Task::Block { block, channel, .. } = task else { return Ok(()) };
        if let Some(error) = error {
            claim.end(Err(error));
            return Ok(());
        }
        let bytes = wanted_bytes(claim.job(), &block);
        let direction = claim.job().plan.direction();
        self.stats.block_done(direction, channel, block.via, bytes, started.elapsed());
        claim.end(Ok(bytes));
        Ok(())
    }
}

/// Bytes of the block that belong to the caller; holes that were read along do not count.
fn wanted_bytes(job: &Job, block: &Block) -> u64 {
    job.plan.segments()[block.segments.clone()]
        .iter()
        .map(|segment| (segment.offset + segment.len).min(block.range.end) - segment.offset.max(block.range.start))
        .sum()
}
