//! Copies between bounce slots and GPUs: one stream for each GPU that a worker has to do with.
//!
//! A copy holds the slot and the GPU's memory until its event is over, and whoever drops this waits for all of them, so that
//! neither is given to somebody else while the GPU works on it.
#![allow(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use deepnvme_cuda::{Event, Memory, Registration, Rows, Stream};
use deepnvme_mem::{Device, Region, RegionMut};

use crate::error::Result;
use crate::gpus::{Gpus, refused};
use crate::split::Direction;

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
    /// Copies by their number: how many lanes are still at it, and what went wrong first.
    unfinished: HashMap<u64, (usize, Result<()>)>,
    next: u64,
    registration: Option<Registration>,
}

/// What goes through one stream, in its order.
struct Lane {
    index: u32,
    stream: Stream,
    in_flight: VecDeque<InFlight>,
    idle: Vec<Event>,
}

struct InFlight {
    number: u64,
    event: Event,
    /// Both ends.
    _memory: Vec<Region>,
}

impl Copies {
    pub(crate) fn new(gpus: &Arc<Gpus>) -> Self {
        let (lanes, unfinished) = (Vec::new(), HashMap::new());
        Self { gpus: Arc::clone(gpus), lanes, unfinished, next: 0, registration: None }
    }

    /// Has the driver know the arena of the slots, so that copies from and to it need no staging. Why not, where it refuses.
    pub(crate) fn register(&mut self, index: u32, arena: &Region) -> Result<()> {
        self.registration = Some(register(&self.gpus.get(index)?, arena)?);
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
        for (lane, slices) in by_lane {
            if let Err(error) = self.lanes[lane].start(number, direction, slot, slices) {
                // What has begun must not go on behind the back of who is told that it has failed.
                for lane in &mut self.lanes {
                    lane.end(number);
                }
                return Err(error);
            }
        }
        self.unfinished.insert(number, (lanes, Ok(())));
        Ok(number)
    }

    /// The copies that are over.
    pub(crate) fn take_finished(&mut self) -> Vec<(u64, Result<()>)> {
        let mut finished = Vec::new();
        for lane in &mut self.lanes {
            while let Some((number, result)) = lane.take_finished() {
                let Some((lanes, outcome)) = self.unfinished.get_mut(&number) else { continue };
                *lanes -= 1;
                if outcome.is_ok() {
                    *outcome = result;
                }
                if *lanes == 0
                    && let Some((_, outcome)) = self.unfinished.remove(&number)
                {
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
        let Device::Cuda { index } = device else { unreachable!("host memory is copied by the processor") };
        if let Some(known) = self.lanes.iter().position(|lane| lane.index == index) {
            return Ok(known);
        }
        let stream = Stream::new(&self.gpus.get(index)?).map_err(|error| refused(&error))?;
        self.lanes.push(Lane { index, stream, in_flight: VecDeque::new(), idle: Vec::new() });
        Ok(self.lanes.len() - 1)
    }
}

impl Lane {
    fn start(&mut self, number: u64, direction: Direction, slot: &Region, slices: Vec<Slice>) -> Result<()> {
        let event = match self.idle.pop() {
            Some(event) => event,
            None => Event::new(self.stream.device()).map_err(|error| refused(&error))?,
        };
        let mut memory = vec![slot.clone()];
        let mut outcome = Ok(());
        for slice in slices {
            if outcome.is_ok() {
                // SAFETY: both ends are held until the event is over. Blocks have slots of their own, and requests that
                // use the same memory at the same time are their caller's to order.
                outcome = unsafe { launch(&self.stream, direction, slot, &slice) };
            }
            memory.push(slice.memory);
        }
        let recorded = event.record(self.stream.raw());
        // Also where a call was refused, others before it may be on their way.
        self.in_flight.push_back(InFlight { number, event, _memory: memory });
        outcome.and(recorded).map_err(|error| refused(&error))
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
                Err(refused(&error))
            }
        };
        let InFlight { number, event, .. } = self.in_flight.pop_front()?;
        self.idle.push(event);
        Some((number, result))
    }
}

/// Starts to copy a slice: from the host's memory to the GPU for a read, the other way for a write.
///
/// # Safety
/// Until an event behind this is over, both ends are alive, and nothing else changes what is copied or uses what it is
/// copied to.
unsafe fn launch(stream: &Stream, direction: Direction, host: &Region, slice: &Slice) -> deepnvme_cuda::Result<()> {
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
                    Direction::Read => stream.copy_to_device(&rows, start),
                    Direction::Write => stream.copy_to_host(start, &rows),
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
    stream: Stream,
    event: Event,
}

impl Fetcher {
    pub(crate) fn new(device: &Arc<deepnvme_cuda::Device>) -> Result<Self> {
        let made = Stream::new(device).and_then(|stream| Ok(Self { stream, event: Event::new(device)? }));
        made.map_err(|error| refused(&error))
    }

    /// Copies slices to the host's memory, which is this call's alone, for a write, from there for a read, and waits for
    /// that.
    pub(crate) fn copy(&self, direction: Direction, host: &Region, slices: &[Slice]) -> Result<()> {
        let mut outcome = Ok(());
        for slice in slices {
            if outcome.is_ok() {
                // SAFETY: both ends are borrowed for this call, which waits for the event, or for the whole stream.
                outcome = unsafe { launch(&self.stream, direction, host, slice) };
            }
        }
        let over = self.event.record(self.stream.raw()).and_then(|()| self.event.wait());
        if over.is_err() {
            let _ = self.stream.synchronize();
        }
        outcome.and(over).map_err(|error| refused(&error))
    }
}

/// Has the driver know memory, so that copies from and to it need no staging, until the answer is dropped.
pub(crate) fn register(device: &Arc<deepnvme_cuda::Device>, arena: &Region) -> Result<Registration> {
    let owner = Box::new(arena.clone());
    // SAFETY: a region's memory stays what it is for as long as a clone of it lives.
    let made = unsafe { Registration::new(device, arena.addr(), arena.len(), owner) };
    made.map_err(|error| refused(&error))
}

/// Memory of a GPU that is its holder's alone, given back when the last region of it is dropped.
pub(crate) fn allocate(device: &Arc<deepnvme_cuda::Device>, bytes: usize) -> deepnvme_cuda::Result<RegionMut> {
    let memory = Memory::new(device, bytes)?;
    let start = std::ptr::without_provenance_mut(memory.address());
    let on = Device::Cuda { index: device.index() };
    // SAFETY: the driver has given as many bytes to nobody else, and the owner keeps them. Any bytes are bytes, also those
    // that were there before, and no reference to a GPU's memory is ever made.
    Ok(unsafe { RegionMut::from_raw(start, bytes, on, Arc::new(memory)) })
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
