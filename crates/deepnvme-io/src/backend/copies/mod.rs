//! Copies between bounce buffers and GPUs: one stream per GPU of a worker.
//!
//! A copy keeps the bounce buffer and the GPU memory until its event is complete, and dropping this waits for all
//! copies. Neither memory is therefore reused while the GPU works on it. `slice` is a part of such a copy. `fetcher`
//! copies synchronously.
#![allow(unsafe_code)]

mod fetcher;
mod slice;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use deepnvme_mem::{Device, Region};

pub(crate) use self::fetcher::Fetcher;
pub(crate) use self::slice::Slice;
use self::slice::launch;
use super::device::{Gpu, GpuEvent, GpuStream, OpenedGpus, Registration};
use crate::error::Result;
use crate::op::Direction;

/// Returns the time in nanoseconds, if it is recorded.
pub(crate) type Clock = Box<dyn Fn() -> Option<u64> + Send>;

/// A completed copy.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) number: u64,
    /// The first error.
    pub(crate) outcome: Result<()>,
    /// The first of its GPUs.
    pub(crate) gpu: u32,
    pub(crate) direction: Direction,
    pub(crate) bytes: u64,
    /// When it became the first in its stream, or the largest number if not recorded.
    pub(crate) start_ns: u64,
    /// When its completion was seen, or 0 if not recorded.
    pub(crate) end_ns: u64,
}

/// The copies of one worker.
pub(crate) struct Copies {
    gpus: Arc<OpenedGpus>,
    lanes: Vec<Lane>,
    /// Copies by their number.
    unfinished: HashMap<u64, Unfinished>,
    next: u64,
    clock: Clock,
    registration: Option<Box<dyn Registration>>,
}

struct Unfinished {
    /// The number of lanes that are still copying.
    lanes: usize,
    finished: Finished,
}

/// One stream and its copies, in order.
struct Lane {
    device: Device,
    gpu: Arc<dyn Gpu>,
    stream: Box<dyn GpuStream>,
    in_flight: VecDeque<InFlight>,
    idle: Vec<Box<dyn GpuEvent>>,
    /// When the last completed copy began, and when its completion was seen, if recorded.
    began_ns: u64,
    free_since_ns: u64,
}

struct InFlight {
    number: u64,
    /// When it was submitted to the stream, if recorded.
    given_ns: u64,
    event: Box<dyn GpuEvent>,
    /// Both ends.
    _memory: Vec<Region>,
}

impl Copies {
    pub(crate) fn new(gpus: &Arc<OpenedGpus>, clock: Clock) -> Self {
        let gpus = Arc::clone(gpus);
        Self { gpus, lanes: Vec::new(), unfinished: HashMap::new(), next: 0, clock, registration: None }
    }

    /// Registers the arena of the bounce buffers with the driver, so that their copies need no staging. Returns the
    /// driver's reason if it refuses.
    pub(crate) fn register(&mut self, device: Device, arena: &Region) -> Result<()> {
        self.registration = Some(self.gpus.get(device)?.register(arena)?);
        Ok(())
    }

    /// Starts to copy the slices of a bounce buffer: into it for a write, out of it for a read. Returns the number of
    /// the copy, which [`Finished`] reports once all slices are complete.
    pub(crate) fn start(&mut self, direction: Direction, slot: &Region, slices: Vec<Slice>) -> Result<u64> {
        let number = self.next;
        self.next += 1;
        let mut by_lane: Vec<(usize, Vec<Slice>)> = Vec::new();
        for slice in slices {
            let lane = self.lane_of(slice.memory.device())?;
            match by_lane.iter_mut().find(|(known, _)| *known == lane) {
                Some((_, slices)) => slices.push(slice),
                None => by_lane.push((lane, vec![slice])),
            }
        }
        let lanes = by_lane.len();
        let bytes = by_lane.iter().flat_map(|(_, slices)| slices).map(|slice| slice.len as u64).sum();
        let gpu = by_lane.first().map_or(0, |(lane, _)| self.lanes[*lane].gpu.index());
        let given_ns = (self.clock)().unwrap_or(0);
        for (lane, slices) in by_lane {
            if let Err(error) = self.lanes[lane].start((number, given_ns), direction, slot, slices) {
                // The caller gets an error, so nothing of this copy may stay in flight.
                for lane in &mut self.lanes {
                    lane.end(number);
                }
                return Err(error);
            }
        }
        let finished = Finished { number, outcome: Ok(()), gpu, direction, bytes, start_ns: u64::MAX, end_ns: 0 };
        self.unfinished.insert(number, Unfinished { lanes, finished });
        Ok(number)
    }

    /// Returns the completed copies.
    pub(crate) fn take_finished(&mut self) -> Vec<Finished> {
        let mut finished = Vec::new();
        for lane in &mut self.lanes {
            while let Some((number, result)) = lane.take_finished() {
                let Some(copy) = self.unfinished.get_mut(&number) else { continue };
                copy.lanes -= 1;
                if copy.finished.outcome.is_ok() {
                    copy.finished.outcome = result;
                }
                if let Some(now) = (self.clock)() {
                    copy.finished.start_ns = copy.finished.start_ns.min(lane.began_ns);
                    copy.finished.end_ns = now;
                    lane.free_since_ns = now;
                }
                if copy.lanes == 0 {
                    finished.extend(self.unfinished.remove(&number).map(|copy| copy.finished));
                }
            }
        }
        finished
    }

    /// Sleeps until the oldest copy of some lane is complete.
    pub(crate) fn wait_for_one(&self) {
        if let Some(copy) = self.lanes.iter().find_map(|lane| lane.in_flight.front()) {
            // The next check of the copy reports the same error.
            let _ = copy.event.wait();
        }
    }

    fn lane_of(&mut self, device: Device) -> Result<usize> {
        if let Some(known) = self.lanes.iter().position(|lane| lane.device == device) {
            return Ok(known);
        }
        let gpu = self.gpus.get(device)?;
        let stream = gpu.new_stream()?;
        let (in_flight, idle) = (VecDeque::new(), Vec::new());
        self.lanes.push(Lane { device, gpu, stream, in_flight, idle, began_ns: 0, free_since_ns: 0 });
        Ok(self.lanes.len() - 1)
    }
}

impl Lane {
    fn start(
        &mut self,
        (number, given_ns): (u64, u64),
        direction: Direction,
        slot: &Region,
        slices: Vec<Slice>,
    ) -> Result<()> {
        let event = match self.idle.pop() {
            Some(event) => event,
            None => self.gpu.new_event()?,
        };
        let mut memory = vec![slot.clone()];
        let mut outcome = Ok(());
        for slice in slices {
            if outcome.is_ok() {
                // SAFETY: both ends are kept until the event is complete. Blocks have separate bounce buffers, and
                // callers order the requests that use the same memory.
                outcome = unsafe { launch(&*self.stream, direction, slot, &slice) };
            }
            memory.push(slice.memory);
        }
        let recorded = event.record(self.stream.raw());
        // Even after a refused call, earlier calls may be in flight.
        self.in_flight.push_back(InFlight { number, given_ns, event, _memory: memory });
        outcome.and(recorded)
    }

    /// Waits for a cancelled copy and drops it.
    fn end(&mut self, number: u64) {
        if self.in_flight.iter().any(|copy| copy.number == number) {
            // If the stream cannot even be waited for, its context is dead and nothing runs there any more.
            let _ = self.stream.synchronize();
            self.in_flight.retain(|copy| copy.number != number);
        }
    }

    fn take_finished(&mut self) -> Option<(u64, Result<()>)> {
        let result = match self.in_flight.front()?.event.is_over() {
            Ok(false) => return None,
            Ok(true) => Ok(()),
            Err(error) => {
                // As in `end`.
                let _ = self.stream.synchronize();
                Err(error)
            }
        };
        let InFlight { number, given_ns, event, .. } = self.in_flight.pop_front()?;
        self.idle.push(event);
        // A stream runs its copies in order, so this one was behind the previous one until then.
        self.began_ns = given_ns.max(self.free_since_ns);
        Some((number, result))
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        for lane in &mut self.lanes {
            if !lane.in_flight.is_empty() && lane.stream.synchronize().is_err() {
                // The GPU may still access the memory, so it is leaked rather than reused.
                std::mem::forget(std::mem::take(&mut lane.in_flight));
            }
        }
    }
}
