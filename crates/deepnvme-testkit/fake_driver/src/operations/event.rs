//! Records events, and waits for them.

use std::time::Instant;

use super::queue::{Delay, StreamOp};
use crate::abi::{Device, Handle, INVALID_HANDLE, NOT_READY, Outcome};
use crate::state::clock::{Clock, Point, StreamId};
use crate::state::event::{Event, Record};
use crate::state::{DriverGuard, DriverState, lock, wait_until};

/// `CU_EVENT_DISABLE_TIMING`.
pub(crate) const DISABLE_TIMING: u32 = 2;

impl DriverState {
    /// `cuEventCreate`.
    pub(crate) fn create_event(&mut self, device: Device, flags: u32) -> Handle {
        let handle = self.handle();
        self.events.insert(handle, device, flags);
        handle
    }

    /// `cuEventRecord`: the event represents this point of the stream from now on.
    pub(crate) fn record(&mut self, handle: Handle, stream: StreamId) -> Outcome {
        let device = self.streams.get(stream)?.device;
        if self.events.get(handle)?.device != device {
            return Err(INVALID_HANDLE);
        }
        let point = self.next_point(stream)?;
        let work = Box::new(move |_: &Clock| reached(handle, point));
        self.enqueue(stream, StreamOp { label: "cuEventRecord", uses: Vec::new(), delay: Delay::Random, work })?;
        let clock = self.streams.get(stream)?.queue.clock().clone();
        self.events.get_mut(handle)?.record = Some(Record { point, clock, time: None });
        Ok(())
    }

    /// `cuStreamWaitEvent`: ops queued from now on wait for the latest record.
    pub(crate) fn wait_for_event(&mut self, handle: Handle, stream: StreamId) -> Outcome {
        let Some(record) = self.events.get(handle)?.record.clone() else { return Ok(()) };
        let op = StreamOp { label: "cuStreamWaitEvent", uses: Vec::new(), delay: Delay::None, work: Box::new(|_| ()) };
        self.enqueue_after(stream, op, &[record.point], &record.clock).map(drop)
    }

    /// `cuEventQuery`.
    pub(crate) fn query_event(&mut self, handle: Handle) -> Outcome {
        let Some(record) = self.events.get(handle)?.record.clone() else { return Ok(()) };
        if !self.streams.reached(record.point) {
            return Err(NOT_READY);
        }
        self.races.observe(&record.clock);
        Ok(())
    }

    /// `cuEventElapsedTime`.
    pub(crate) fn elapsed_ms(&self, start: Handle, end: Handle) -> Outcome<f32> {
        let (start, end) = (self.events.get(start)?, self.events.get(end)?);
        if start.device != end.device {
            return Err(INVALID_HANDLE);
        }
        let (start, end) = (self.time_of(start)?, self.time_of(end)?);
        let earlier = start.saturating_duration_since(end).as_secs_f32();
        Ok((end.saturating_duration_since(start).as_secs_f32() - earlier) * 1000.0)
    }

    fn time_of(&self, event: &Event) -> Outcome<Instant> {
        let record = event.record.as_ref().filter(|_| event.flags & DISABLE_TIMING == 0).ok_or(INVALID_HANDLE)?;
        if self.streams.reached(record.point) { record.time.ok_or(NOT_READY) } else { Err(NOT_READY) }
    }
}

/// `cuEventSynchronize`.
pub(crate) fn synchronise(state: DriverGuard, handle: Handle) -> Outcome {
    let Some(record) = state.events.get(handle)?.record.clone() else { return Ok(()) };
    let mut state = wait_until(state, |state| state.streams.reached(record.point));
    state.races.observe(&record.clock);
    Ok(())
}

/// A stream reached a record: store the time, unless the event was recorded again.
fn reached(handle: Handle, point: Point) {
    let mut state = lock();
    let record = state.events.get_mut(handle).ok().and_then(|event| event.record.as_mut());
    if let Some(record) = record.filter(|record| record.point == point) {
        record.time = Some(Instant::now());
    }
}
