//! The queue of a stream: its ops that have not begun.

use std::collections::VecDeque;
use std::time::Duration;

use super::clock::{Clock, Point};
use crate::rng::Rng;

/// The work of an op, called without the lock with the clock of completed work.
pub(crate) type Work = Box<dyn FnOnce(&Clock) + Send>;

/// The ops of a stream that have not begun, and how far the others are.
pub(crate) struct OpQueue {
    pub(crate) submitted: u64,
    pub(crate) completed: u64,
    /// The clock of the last queued op, with everything that it waits for.
    pub(crate) clock: Clock,
    pub(crate) ops: VecDeque<QueuedOp>,
    pub(crate) rng: Rng,
}

impl OpQueue {
    /// Creates an empty queue, with the generator of its random delays.
    pub(crate) fn new(rng: Rng) -> Self {
        Self { submitted: 0, completed: 0, clock: Clock::default(), ops: VecDeque::new(), rng }
    }
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
