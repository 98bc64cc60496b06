//! The queue of a stream: its ops that have not begun.

use std::collections::VecDeque;
use std::time::Duration;

use super::clock::{Clock, Point};
use crate::rng::Rng;

/// The work of an op, called without the lock with the clock of completed work.
pub(crate) type Work = Box<dyn FnOnce(&Clock) + Send>;

/// The ops of a stream that have not begun, and how far the others are.
pub(crate) struct OpQueue {
    submitted: u64,
    completed: u64,
    /// The clock of the last queued op, with everything that it waits for.
    clock: Clock,
    ops: VecDeque<QueuedOp>,
    rng: Rng,
}

/// A queued op.
pub(crate) struct QueuedOp {
    pub(crate) seq: u64,
    /// The points of other streams that it waits for.
    pub(crate) after: Vec<Point>,
    pub(crate) clock: Clock,
    pub(crate) delay: Duration,
    pub(crate) work: Work,
}

impl OpQueue {
    /// Creates an empty queue, with the generator of its random delays.
    pub(crate) fn new(rng: Rng) -> Self {
        Self { submitted: 0, completed: 0, clock: Clock::default(), ops: VecDeque::new(), rng }
    }

    /// Returns the number of the last queued op.
    pub(crate) fn submitted(&self) -> u64 {
        self.submitted
    }

    /// Returns the clock of the last queued op, with everything that it waits for.
    pub(crate) fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Draws a delay up to a maximum.
    pub(crate) fn random_delay(&mut self, max_us: u64) -> Duration {
        Duration::from_micros(self.rng.below(max_us + 1))
    }

    /// Advances the clock to the point of a new op, after everything that the op waits for. Returns the clock.
    pub(crate) fn advance(&mut self, point: Point, predecessors: [&Clock; 2]) -> Clock {
        self.submitted = point.seq;
        predecessors.into_iter().for_each(|clock| self.clock.join(clock));
        self.clock.reach(point);
        self.clock.clone()
    }

    pub(crate) fn push(&mut self, op: QueuedOp) {
        self.ops.push_back(op);
    }

    pub(crate) fn pop(&mut self) -> Option<QueuedOp> {
        self.ops.pop_front()
    }

    /// Returns the next op to run.
    pub(crate) fn front(&self) -> Option<&QueuedOp> {
        self.ops.front()
    }

    /// Marks the ops up to this number as complete.
    pub(crate) fn complete(&mut self, seq: u64) {
        self.completed = seq;
    }

    /// Returns whether the ops up to this number are complete.
    pub(crate) fn has_completed(&self, seq: u64) -> bool {
        self.completed >= seq
    }
}
