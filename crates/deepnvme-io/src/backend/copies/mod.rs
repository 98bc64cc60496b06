//! Copies between bounce slots and GPUs: one stream for each GPU that a worker has to do with.
//!
//! A copy holds the slot and the GPU's memory until its event is over, and whoever drops this waits for all of them, so that
//! neither is given to somebody else while the GPU works on it. `slice` is a part of such a copy; `fetcher` copies while somebody
//! waits.
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

/// The time in nanoseconds, if anybody wants to know.
pub(crate) type Clock = Box<dyn Fn() -> Option<u64> + Send>;

/// A copy that is over.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) number: u64,
    /// What went wrong first.
    pub(crate) outcome: Result<()>,
    /// The first of its GPUs.
    pub(crate) gpu: u32,
    pub(crate) direction: Direction,
    pub(crate) bytes: u64,
    /// When it was the first in its stream; the largest number where nobody wanted to know.
    pub(crate) start_ns: u64,
    /// When it was seen to be over; 0 where nobody wanted to know.
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
    /// How many are still at it.
    lanes: usize,
    finished: Finished,
}

/// What goes through one stream, in its order.
struct Lane {
    device: Device,
    gpu: Arc<dyn Gpu>,
    stream: Box<dyn GpuStream>,
    in_flight: VecDeque<InFlight>,
    idle: Vec<Box<dyn GpuEvent>>,
    /// When the copy that was last seen to be over began, and when it was seen, if that was recorded.
    began_ns: u64,
    free_since_ns: u64,
}

struct InFlight {
    number: u64,
    /// When it was given to the stream, if that was recorded.
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

    /// Has the driver know the arena of the slots, so that copies from and to it need no staging. Why not, where it refuses.
    pub(crate) fn register(&mut self, device: Device, arena: &Region) -> Result<()> {
        self.registration = Some(self.gpus.get(device)?.register(arena)?);
        Ok(())
    }

    /// Starts to copy the slices of a slot: into it for a write, out of it for a read. The number is told again when all
    /// of them are over.
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
                // What has begun must not go on behind the back of who is told that it has failed.
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

    /// The copies that are over.
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

    /// Sleeps until the oldest copy of some lane is over.
    pub(crate) fn wait_for_one(&self) {
        if let Some(copy) = self.lanes.iter().find_map(|lane| lane.in_flight.front()) {
            // What it says is said again to whoever asks whether the copy is over.
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
                // SAFETY: both ends are held until the event is over. Blocks have slots of their own, and requests that
                // use the same memory at the same time are their caller's to order.
                outcome = unsafe { launch(&*self.stream, direction, slot, &slice) };
            }
            memory.push(slice.memory);
        }
        let recorded = event.record(self.stream.raw());
        // Also where a call was refused, others before it may be on their way.
        self.in_flight.push_back(InFlight { number, given_ns, event, _memory: memory });
        outcome.and(recorded)
    }

    /// Drops a copy that nobody asks for any more, when it is over.
    fn end(&mut self, number: u64) {
        if self.in_flight.iter().any(|copy| copy.number == number) {
            // Where a stream cannot even be waited for, its context is dead, and nothing runs there any more.
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
        // A stream does one after the other: until then, this one was behind that before it.
        self.began_ns = given_ns.max(self.free_since_ns);
        Some((number, result))
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        for lane in &mut self.lanes {
            if !lane.in_flight.is_empty() && lane.stream.synchronize().is_err() {
                // Nobody waits for it, so that it may as well be lost rather than be given to somebody else.
                std::mem::forget(std::mem::take(&mut lane.in_flight));
            }
        }
    }
}
