//! One run over a request plan: the requests in flight on an engine, and the memory that they hold.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use deepnvme_io::mem::{Region, RegionMut};
use deepnvme_io::{Engine, ReadItem, TensorFile, Transfer, Transferred, WriteItem, WriteOptions};

use super::plan::{Piece, RequestPlan};
use super::workload::Direction;
use crate::error::{Error, Result};

/// Time between two progress reports.
const UPDATE_INTERVAL: Duration = Duration::from_millis(20);

/// The requests that have been started, the oldest first.
pub(super) struct EngineRun<'a> {
    engine: &'a Engine,
    files: &'a [Arc<TensorFile>],
    direction: Direction,
    options: WriteOptions,
    /// The memory of each slot; `None` while a read holds it.
    memory: &'a mut [Option<RegionMut>],
    in_flight: VecDeque<StartedRequest>,
    bytes_done: u64,
}

/// A request in flight: a read has the slots whose memory it holds, a write its number of pieces.
enum StartedRequest {
    Read(Vec<usize>, Transfer<Vec<RegionMut>>),
    Write(usize, Transfer<Vec<Region>>),
}

impl StartedRequest {
    fn pieces(&self) -> usize {
        match self {
            Self::Read(slots, _) => slots.len(),
            Self::Write(pieces, _) => *pieces,
        }
    }

    fn wait_timeout(&self, timeout: Duration) -> bool {
        match self {
            Self::Read(_, pending) => pending.wait_timeout(timeout),
            Self::Write(_, pending) => pending.wait_timeout(timeout),
        }
    }

    fn bytes_done(&self) -> u64 {
        match self {
            Self::Read(_, pending) => pending.progress().bytes_done,
            Self::Write(_, pending) => pending.progress().bytes_done,
        }
    }

    fn cancel(&self) {
        match self {
            Self::Read(_, pending) => pending.cancel(),
            Self::Write(_, pending) => pending.cancel(),
        };
    }
}

impl<'a> EngineRun<'a> {
    pub(super) fn new(
        engine: &'a Engine,
        files: &'a [Arc<TensorFile>],
        direction: Direction,
        options: WriteOptions,
        memory: &'a mut [Option<RegionMut>],
    ) -> Self {
        Self { engine, files, direction, options, memory, in_flight: VecDeque::new(), bytes_done: 0 }
    }

    /// Runs all requests, as many at once as the plan allows. `report` gets the seconds and bytes so far and may stop
    /// the run. All started requests have ended when this returns, even on failure.
    pub(super) fn run(
        mut self,
        plan: &RequestPlan,
        began: Instant,
        report: &mut dyn FnMut(f64, u64) -> Result<()>,
    ) -> Result<()> {
        let ran = self.start_all(plan, began, report);
        self.drain();
        ran
    }

    fn start_all(
        &mut self,
        plan: &RequestPlan,
        began: Instant,
        report: &mut dyn FnMut(f64, u64) -> Result<()>,
    ) -> Result<()> {
        let mut report = |run: &Self| report(began.elapsed().as_secs_f64(), run.bytes_transferred());
        let mut next_report = UPDATE_INTERVAL;
        for pieces in plan.requests() {
            while self.pieces_in_flight() + pieces.len() > plan.in_flight && !self.in_flight.is_empty() {
                self.wait_oldest(&mut report)?;
            }
            self.start(pieces)?;
            if began.elapsed() >= next_report {
                report(self)?;
                next_report = began.elapsed() + UPDATE_INTERVAL;
            }
        }
        while !self.in_flight.is_empty() {
            self.wait_oldest(&mut report)?;
        }
        report(self)
    }

    fn bytes_transferred(&self) -> u64 {
        self.bytes_done + self.in_flight.iter().map(StartedRequest::bytes_done).sum::<u64>()
    }

    fn pieces_in_flight(&self) -> usize {
        self.in_flight.iter().map(StartedRequest::pieces).sum()
    }

    /// Starts one request for these pieces.
    fn start(&mut self, pieces: &[Piece]) -> Result<()> {
        let started = match self.direction {
            Direction::Read => {
                let items = pieces.iter().map(|piece| {
                    let (file, target) = (Arc::clone(&self.files[piece.file]), self.memory[piece.slot].take()?);
                    Some(ReadItem { file, offset: piece.offset, target })
                });
                let Some(items) = items.collect::<Option<Vec<_>>>() else { return Err(memory_in_use()) };
                let slots = pieces.iter().map(|piece| piece.slot).collect();
                StartedRequest::Read(slots, self.engine.read_batch(items)?)
            }
            Direction::Write => {
                let items = pieces.iter().map(|piece| {
                    let (file, source) =
                        (Arc::clone(&self.files[piece.file]), self.memory[piece.slot].as_ref()?.region());
                    Some(WriteItem { file, offset: piece.offset, source })
                });
                let Some(items) = items.collect::<Option<Vec<_>>>() else { return Err(memory_in_use()) };
                StartedRequest::Write(pieces.len(), self.engine.write_batch(items, self.options)?)
            }
        };
        self.in_flight.push_back(started);
        Ok(())
    }

    /// Waits for the oldest request, and reports the progress while it does.
    fn wait_oldest(&mut self, report: &mut dyn FnMut(&Self) -> Result<()>) -> Result<()> {
        while self.in_flight.front().is_some_and(|oldest| !oldest.wait_timeout(UPDATE_INTERVAL)) {
            report(self)?;
        }
        self.take_oldest().map(|transfer| self.bytes_done += transfer.map_or(0, |transfer| transfer.bytes))
    }

    /// Takes back the memory of the oldest request.
    fn take_oldest(&mut self) -> Result<Option<Transferred>> {
        match self.in_flight.pop_front() {
            None => Ok(None),
            Some(StartedRequest::Read(slots, pending)) => {
                let (regions, outcome) = pending.wait();
                for (slot, region) in slots.into_iter().zip(regions.into_iter().flatten()) {
                    self.memory[slot] = Some(region);
                }
                Ok(Some(outcome?))
            }
            Some(StartedRequest::Write(_, pending)) => Ok(Some(pending.wait().1?)),
        }
    }

    /// Cancels all requests in flight and takes back their memory. After a good run there are none.
    fn drain(&mut self) {
        self.in_flight.iter().for_each(StartedRequest::cancel);
        while !self.in_flight.is_empty() {
            // The run has failed already, with the first error.
            let _ = self.take_oldest();
        }
    }
}

/// Creates the error of a slot without memory: an earlier request failed without returning it.
fn memory_in_use() -> Error {
    Error::failed("the engine did not return the memory of an earlier request; report this as a bug")
}
