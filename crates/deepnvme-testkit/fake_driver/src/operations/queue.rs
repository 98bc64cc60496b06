//! Queues ops, and runs them: threads of streams run their ops in order, late, and independently of each other.
//!
//! The dependencies of an op on other streams are fixed when it is queued. They come from events, and from the legacy
//! default stream: its ops wait for everything queued earlier in blocking streams of the device, and later ops of
//! blocking streams wait for them.

use std::thread;
use std::time::Duration;

use crate::abi::{Outcome, without_panic};
use crate::access::Access;
use crate::state::clock::{Clock, Point, StreamId};
use crate::state::op_queue::{QueuedOp, Work};
use crate::state::race_detector::TrackedOp;
use crate::state::stream::{Stream, StreamKind};
use crate::state::{DriverGuard, DriverState, lock, notify, wait_until};

/// The delay of an op after its turn has come.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Delay {
    None,
    /// Random, up to the configured maximum.
    Random,
    Exactly(Duration),
}

/// An op to be queued.
pub(crate) struct StreamOp {
    /// The function that queued it.
    pub(crate) label: &'static str,
    pub(crate) uses: Vec<Access>,
    pub(crate) delay: Delay,
    pub(crate) work: Work,
}

impl DriverState {
    /// Returns the point of a stream's next op.
    pub(crate) fn next_point(&mut self, id: StreamId) -> Outcome<Point> {
        Ok(Point { stream: id, seq: self.streams.get(id)?.queue.submitted() + 1 })
    }

    /// Queues an op. Returns its point.
    pub(crate) fn enqueue(&mut self, id: StreamId, op: StreamOp) -> Outcome<Point> {
        self.enqueue_after(id, op, &[], &Clock::default())
    }

    /// Queues an op that also waits for points of other streams, and for their predecessors.
    pub(crate) fn enqueue_after(
        &mut self,
        id: StreamId,
        op: StreamOp,
        waits_for: &[Point],
        predecessors: &Clock,
    ) -> Outcome<Point> {
        if self.captures.has(id) {
            self.call_log.count("captured_ops");
            return Ok(Point { stream: id, seq: self.streams.get(id)?.queue.submitted() });
        }
        let point = self.next_point(id)?;
        let (mut after, clock) = self.legacy_dependencies(id)?;
        after.extend_from_slice(waits_for);
        let delay_us = self.config.delay_us;
        let stream = self.streams.get_mut(id)?;
        let clock = stream.queue.advance(point, [&clock, predecessors]);
        let delay = match op.delay {
            Delay::None => Duration::ZERO,
            Delay::Random => stream.queue.random_delay(delay_us),
            Delay::Exactly(delay) => delay,
        };
        stream.queue.push(QueuedOp { seq: point.seq, after, clock: clock.clone(), delay, work: op.work });
        let found = self.races.begin(TrackedOp { point, label: op.label, uses: op.uses, clock, over: false });
        self.record_violations(found);
        notify();
        Ok(point)
    }

    /// Returns the implicit dependencies by the legacy default stream.
    fn legacy_dependencies(&mut self, id: StreamId) -> Outcome<(Vec<Point>, Clock)> {
        let Stream { device, kind, .. } = *self.streams.get(id)?;
        Ok(match kind {
            StreamKind::Legacy => {
                self.streams.ends(device, |other| other.is_blocking() && other.kind != StreamKind::Legacy)
            }
            StreamKind::Created { is_blocking: false } => (Vec::new(), Clock::default()),
            _ => self.streams.ends(device, |other| other.kind == StreamKind::Legacy),
        })
    }
}

/// Waits until all current ops of a stream are complete, and marks them as observed.
pub(crate) fn synchronise(mut state: DriverGuard, id: StreamId) -> DriverGuard {
    let Ok(stream) = state.streams.get(id) else { return state };
    let (end, clock) = (Point { stream: id, seq: stream.queue.submitted() }, stream.queue.clock().clone());
    state = wait_until(state, |state| state.streams.reached(end));
    state.races.observe(&clock);
    state
}

/// The thread of a stream.
pub(crate) fn run_stream(id: StreamId) {
    while let Some(op) = next(id) {
        if !op.delay.is_zero() {
            thread::sleep(op.delay);
        }
        let panicked = without_panic(|| (op.work)(&op.clock)).is_none();
        let mut state = lock();
        if panicked {
            state.call_log.violation(format!("panic: in op {} of stream {id:#x}", op.seq));
        }
        if let Ok(stream) = state.streams.get_mut(id) {
            stream.queue.complete(op.seq);
        }
        state.races.end(Point { stream: id, seq: op.seq });
        notify();
    }
}

/// Waits for the next op to run; `None` when a destroyed stream has run all of its ops.
fn next(id: StreamId) -> Option<QueuedOp> {
    let ready = |state: &DriverState| {
        let Ok(stream) = state.streams.get(id) else { return true };
        stream
            .queue
            .front()
            .map_or(stream.is_destroyed, |op| op.after.iter().all(|point| state.streams.reached(*point)))
    };
    let mut state = wait_until(lock(), ready);
    let op = state.streams.get_mut(id).ok()?.queue.pop();
    if op.is_none() {
        state.streams.remove(id);
        notify();
    }
    op
}
