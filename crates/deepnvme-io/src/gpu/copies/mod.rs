//! Copies between bounce buffers and GPUs: one stream per GPU of a worker.
//!
//! A copy keeps the bounce buffer and the GPU memory until its event is complete, and dropping [`AsyncCopier`] waits
//! for all copies. So neither memory is reused while the GPU works on it. `slice` is a part of such a copy. `blocking`
//! copies and waits.
#![allow(unsafe_code)]

mod blocking;
mod slice;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use deepnvme_mem::{Device, Region, RegistrableRange};

pub(crate) use self::blocking::{BlockingCopier, CopyInFlight};
pub(crate) use self::slice::GpuSlice;
use self::slice::launch;
use super::device::{COPY_WAIT, Gpu, GpuEvent, GpuStream, Registration};
use super::registry::GpuRegistry;
use crate::error::Result;
use crate::op::Direction;
use crate::trace::GpuCopy;

/// Returns the time in nanoseconds, if it is recorded.
pub(crate) type Clock = Box<dyn Fn() -> Option<u64> + Send>;

/// A completed copy.
#[derive(Debug)]
pub(crate) struct CompletedCopy {
    pub(crate) number: u64,
    /// Success, or the first error.
    pub(crate) outcome: Result<()>,
    /// The direction, the bytes of all slices, and the first of the GPUs.
    pub(crate) copy: GpuCopy,
    /// When it became the first in its stream, or the largest number if not recorded.
    pub(crate) start_ns: u64,
    /// When its completion was seen, or 0 if not recorded.
    pub(crate) end_ns: u64,
}

/// The asynchronous copies of one worker.
pub(crate) struct AsyncCopier {
    gpus: Arc<GpuRegistry>,
    queues: Vec<CopyQueue>,
    /// Copies by their number.
    pending: HashMap<u64, PendingCopy>,
    next: u64,
    clock: Clock,
    registration: Option<Box<dyn Registration>>,
}

struct PendingCopy {
    /// The number of GPUs that are still copying.
    gpus_left: usize,
    result: CompletedCopy,
}

/// One stream and its copies, in order.
struct CopyQueue {
    device: Device,
    gpu: Arc<dyn Gpu>,
    stream: Box<dyn GpuStream>,
    in_flight: VecDeque<InFlightCopy>,
    idle_events: Vec<Box<dyn GpuEvent>>,
    /// When the last completed copy began, and when its completion was seen. 0 if not recorded.
    began_ns: u64,
    free_since_ns: u64,
}

struct InFlightCopy {
    number: u64,
    /// When it was submitted to the stream, if recorded.
    submitted_ns: u64,
    event: Box<dyn GpuEvent>,
    /// Both ends.
    _memory: Vec<Region>,
}

impl AsyncCopier {
    pub(crate) fn new(gpus: &Arc<GpuRegistry>, clock: Clock) -> Self {
        let gpus = Arc::clone(gpus);
        Self { gpus, queues: Vec::new(), pending: HashMap::new(), next: 0, clock, registration: None }
    }

    /// Registers the arena of the bounce buffers with the driver, so that their copies need no staging. Returns the
    /// driver's reason if it refuses.
    pub(crate) fn register(&mut self, device: Device, arena: &RegistrableRange) -> Result<()> {
        self.registration = Some(self.gpus.get(device)?.register(arena)?);
        Ok(())
    }

    /// Starts to copy the slices of a bounce buffer: into it for a write, out of it for a read. Returns the number of
    /// the copy, which [`CompletedCopy`] reports once all slices are complete.
    pub(crate) fn start(&mut self, direction: Direction, buffer: &Region, slices: Vec<GpuSlice>) -> Result<u64> {
        let number = self.next;
        self.next += 1;
        let mut by_queue: Vec<(usize, Vec<GpuSlice>)> = Vec::new();
        for slice in slices {
            let queue = self.queue_of(slice.memory.device())?;
            match by_queue.iter_mut().find(|(known, _)| *known == queue) {
                Some((_, slices)) => slices.push(slice),
                None => by_queue.push((queue, vec![slice])),
            }
        }
        let gpus_left = by_queue.len();
        let bytes = by_queue.iter().flat_map(|(_, slices)| slices).map(|slice| slice.len as u64).sum();
        let gpu = by_queue.first().map_or(0, |(queue, _)| self.queues[*queue].gpu.index());
        let submitted_ns = (self.clock)().unwrap_or(0);
        for (queue, slices) in by_queue {
            if let Err(error) = self.queues[queue].start((number, submitted_ns), direction, buffer, slices) {
                // The caller gets an error, so nothing of this copy may stay in flight.
                for queue in &mut self.queues {
                    queue.abandon(number);
                }
                return Err(error);
            }
        }
        let copy = GpuCopy { gpu, direction, bytes };
        let result = CompletedCopy { number, outcome: Ok(()), copy, start_ns: u64::MAX, end_ns: 0 };
        self.pending.insert(number, PendingCopy { gpus_left, result });
        Ok(number)
    }

    /// Returns the completed copies.
    pub(crate) fn take_completed(&mut self) -> Vec<CompletedCopy> {
        let mut completed = Vec::new();
        for queue in &mut self.queues {
            while let Some((number, outcome)) = queue.take_completed() {
                let Some(copy) = self.pending.get_mut(&number) else { continue };
                copy.gpus_left -= 1;
                if copy.result.outcome.is_ok() {
                    copy.result.outcome = outcome;
                }
                if let Some(now) = (self.clock)() {
                    copy.result.start_ns = copy.result.start_ns.min(queue.began_ns);
                    copy.result.end_ns = now;
                    queue.free_since_ns = now;
                }
                if copy.gpus_left == 0 {
                    completed.extend(self.pending.remove(&number).map(|copy| copy.result));
                }
            }
        }
        completed
    }

    /// Sleeps until the oldest copy of some GPU is complete, or for [`COPY_WAIT`].
    pub(crate) fn wait_for_one(&self) {
        if let Some(copy) = self.queues.iter().find_map(|queue| queue.in_flight.front()) {
            // The next check of the copy reports the same error.
            let _ = copy.event.wait(COPY_WAIT);
        }
    }

    fn queue_of(&mut self, device: Device) -> Result<usize> {
        if let Some(known) = self.queues.iter().position(|queue| queue.device == device) {
            return Ok(known);
        }
        let gpu = self.gpus.get(device)?;
        let stream = gpu.new_stream()?;
        let (in_flight, idle_events) = (VecDeque::new(), Vec::new());
        self.queues.push(CopyQueue { device, gpu, stream, in_flight, idle_events, began_ns: 0, free_since_ns: 0 });
        Ok(self.queues.len() - 1)
    }
}

impl CopyQueue {
    fn start(
        &mut self,
        (number, submitted_ns): (u64, u64),
        direction: Direction,
        buffer: &Region,
        slices: Vec<GpuSlice>,
    ) -> Result<()> {
        let event = match self.idle_events.pop() {
            Some(event) => event,
            None => self.gpu.new_event()?,
        };
        let mut memory = vec![buffer.clone()];
        let mut outcome = Ok(());
        for slice in slices {
            if outcome.is_ok() {
                // SAFETY: both ends are kept until the event is complete. Blocks have separate bounce buffers, and
                // callers order the requests that use the same memory.
                outcome = unsafe { launch(&*self.stream, direction, buffer, &slice) };
            }
            memory.push(slice.memory);
        }
        let recorded = event.record(self.stream.raw());
        // Even after a refused call, earlier calls may be in flight.
        self.in_flight.push_back(InFlightCopy { number, submitted_ns, event, _memory: memory });
        outcome.and(recorded)
    }

    /// Waits for a copy that was not started entirely, and drops it.
    fn abandon(&mut self, number: u64) {
        if self.in_flight.iter().any(|copy| copy.number == number) {
            // If the stream cannot even be waited for, its context is dead and nothing runs there any more.
            let _ = self.stream.synchronise();
            self.in_flight.retain(|copy| copy.number != number);
        }
    }

    fn take_completed(&mut self) -> Option<(u64, Result<()>)> {
        let result = match self.in_flight.front()?.event.is_complete() {
            Ok(false) => return None,
            Ok(true) => Ok(()),
            Err(error) => {
                // As in `abandon`.
                let _ = self.stream.synchronise();
                Err(error)
            }
        };
        let InFlightCopy { number, submitted_ns, event, .. } = self.in_flight.pop_front()?;
        self.idle_events.push(event);
        // A stream runs its copies in order, so this one was behind the previous one until then.
        self.began_ns = submitted_ns.max(self.free_since_ns);
        Some((number, result))
    }
}

impl Drop for AsyncCopier {
    fn drop(&mut self) {
        for queue in &mut self.queues {
            if !queue.in_flight.is_empty() && queue.stream.synchronise().is_err() {
                // Nothing should run after a failure. The memory is leaked all the same, which is safe even if the GPU
                // still accesses it.
                std::mem::forget(std::mem::take(&mut queue.in_flight));
            }
        }
    }
}
