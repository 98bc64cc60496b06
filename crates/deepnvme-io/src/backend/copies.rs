//! Copies between bounce slots and GPUs: one stream for each GPU that a worker has to do with.
//!
//! A copy holds the slot and the GPU's memory until its event is over, and whoever drops this waits for all of them, so that
//! neither is given to somebody else while the GPU works on it.
#![allow(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use deepnvme_mem::{Device, Region};

use super::device::{Gpu, GpuEvent, GpuStream, Registration, Rows};
use crate::error::Result;
use crate::gpus::Gpus;
use crate::split::Direction;
use crate::trace::{Copied, Tape};

#[cfg(test)]
mod tests;

/// A part of a slot that belongs to memory on a GPU.
#[derive(Debug)]
pub(crate) struct Slice {
    /// Where in the slot it begins.
    pub(crate) at: usize,
    /// The memory on the GPU.
    pub(crate) memory: Region,
    /// Where in that.
    pub(crate) from: usize,
    pub(crate) len: usize,
}

/// The copies of one worker.
pub(crate) struct Copies {
    gpus: Arc<Gpus>,
    lanes: Vec<Lane>,
    /// Copies by their number.
    unfinished: HashMap<u64, Unfinished>,
    next: u64,
    tape: Tape,
    registration: Option<Box<dyn Registration>>,
}

struct Unfinished {
    /// How many are still at it.
    lanes: usize,
    /// What went wrong first.
    outcome: Result<()>,
    copied: Copied,
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
    pub(crate) fn new(gpus: &Arc<Gpus>, tape: &Tape) -> Self {
        let (gpus, tape) = (Arc::clone(gpus), tape.clone());
        Self { gpus, lanes: Vec::new(), unfinished: HashMap::new(), next: 0, tape, registration: None }
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
        let given_ns = self.tape.now().unwrap_or(0);
        for (lane, slices) in by_lane {
            if let Err(error) = self.lanes[lane].start((number, given_ns), direction, slot, slices) {
                // What has begun must not go on behind the back of who is told that it has failed.
                for lane in &mut self.lanes {
                    lane.end(number);
                }
                return Err(error);
            }
        }
        let copied = Copied { gpu, direction, bytes, start_ns: u64::MAX, end_ns: 0, failed: false };
        self.unfinished.insert(number, Unfinished { lanes, outcome: Ok(()), copied });
        Ok(number)
    }

    /// The copies that are over.
    pub(crate) fn take_finished(&mut self) -> Vec<(u64, Result<()>)> {
        let mut finished = Vec::new();
        for lane in &mut self.lanes {
            while let Some((number, result)) = lane.take_finished() {
                let Some(copy) = self.unfinished.get_mut(&number) else { continue };
                copy.lanes -= 1;
                if copy.outcome.is_ok() {
                    copy.outcome = result;
                }
                if let Some(now) = self.tape.now() {
                    copy.copied.start_ns = copy.copied.start_ns.min(lane.began_ns);
                    copy.copied.end_ns = now;
                    lane.free_since_ns = now;
                }
                if copy.lanes == 0
                    && let Some(Unfinished { outcome, copied, .. }) = self.unfinished.remove(&number)
                {
                    self.tape.copy(Copied { failed: outcome.is_err(), ..copied });
                    finished.push((number, outcome));
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

/// Starts to copy a slice: from the host's memory to the GPU for a read, the other way for a write.
///
/// # Safety
/// Until an event behind this is over, both ends are alive, and nothing else changes what is copied or uses what it is
/// copied to.
unsafe fn launch(stream: &dyn GpuStream, direction: Direction, host: &Region, slice: &Slice) -> Result<()> {
    let Slice { at, memory, from, len } = slice;
    assert!(at.checked_add(*len).is_some_and(|end| end <= host.len()), "a slice lies in its slot");
    let mut start = std::ptr::with_exposed_provenance_mut::<u8>(host.addr() + at);
    let mut outcome = Ok(());
    memory.each_row(*from, *len, |address, bytes, count, pitch| {
        let rows = Rows { address, bytes, count, pitch };
        if outcome.is_ok() {
            // SAFETY: the host's memory has these bytes, as was checked, and the GPU's its rows; the rest is the caller's
            // word.
            outcome = unsafe {
                match direction {
                    Direction::Read => stream.copy_to_gpu(rows, start),
                    Direction::Write => stream.copy_to_host(start, rows),
                }
            };
        }
        start = start.wrapping_add(rows.total_bytes());
    });
    outcome
}

/// Copies from and to one GPU for somebody who waits.
#[derive(Debug)]
pub(crate) struct Fetcher {
    gpu: Arc<dyn Gpu>,
    stream: Box<dyn GpuStream>,
    event: Box<dyn GpuEvent>,
}

impl Fetcher {
    pub(crate) fn new(gpu: Arc<dyn Gpu>) -> Result<Self> {
        let (stream, event) = (gpu.new_stream()?, gpu.new_event()?);
        Ok(Self { gpu, stream, event })
    }

    /// The number of its GPU.
    pub(crate) fn index(&self) -> u32 {
        self.gpu.index()
    }

    /// Copies slices to the host's memory, which is this call's alone, for a write, from there for a read, and waits for
    /// that.
    pub(crate) fn copy(&self, direction: Direction, host: &Region, slices: &[Slice]) -> Result<()> {
        let mut outcome = Ok(());
        for slice in slices {
            if outcome.is_ok() {
                // SAFETY: both ends are borrowed for this call, which waits for the event, or for the whole stream.
                outcome = unsafe { launch(&*self.stream, direction, host, slice) };
            }
        }
        let over = self.event.record(self.stream.raw()).and_then(|()| self.event.wait());
        if over.is_err() {
            let _ = self.stream.synchronize();
        }
        outcome.and(over)
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
