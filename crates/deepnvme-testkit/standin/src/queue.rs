//! Queues: threads of streams work them off in order, late, and independently of each other.
//!
//! What an op has to wait for besides its own stream is fixed when it is queued: points of other streams. They come
//! from events, and from the legacy default stream, whose ops wait for all that was queued in blocking streams of the
//! device before, and for which later ops of blocking streams wait.

use std::thread;
use std::time::Duration;

use crate::abi::{Handle, Outcome};
use crate::calls::without_panic;
use crate::order::{Clock, Entry, Point};
use crate::span::Use;
use crate::stream::{Kind, Stream};
use crate::world::{Guard, World, lock, notify, wait_until};

/// What an op does when its turn comes, told what is over by then. It runs without the lock.
pub(crate) type Work = Box<dyn FnOnce(&Clock) + Send>;

/// How long an op waits after its turn has come.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Delay {
    None,
    /// Up to the longest delay of the settings.
    Random,
    Exactly(Duration),
}

/// An op before it is queued.
pub(crate) struct Op {
    /// The function that asked for it.
    pub(crate) label: &'static str,
    pub(crate) uses: Vec<Use>,
    pub(crate) delay: Delay,
    pub(crate) work: Work,
}

/// An op in a queue.
pub(crate) struct Queued {
    seq: u64,
    after: Vec<Point>,
    clock: Clock,
    delay: Duration,
    work: Work,
}

impl World {
    /// Where the next op of a stream will be.
    pub(crate) fn next_point(&mut self, id: Handle) -> Outcome<Point> {
        Ok(Point { stream: id, seq: self.streams.get_mut(id)?.submitted + 1 })
    }

    /// Queues an op, and says where it is.
    pub(crate) fn enqueue(&mut self, id: Handle, op: Op) -> Outcome<Point> {
        self.enqueue_after(id, op, &[], &Clock::default())
    }

    /// Queues an op that waits for points of other streams, with what they come after.
    pub(crate) fn enqueue_after(&mut self, id: Handle, op: Op, extra: &[Point], known: &Clock) -> Outcome<Point> {
        let point = self.next_point(id)?;
        let (mut after, implied) = self.implied(id)?;
        after.extend_from_slice(extra);
        let delay_us = self.config.delay_us;
        let stream = self.streams.get_mut(id)?;
        stream.submitted = point.seq;
        stream.clock.join(&implied);
        stream.clock.join(known);
        stream.clock.reach(point);
        let delay = match op.delay {
            Delay::None => Duration::ZERO,
            Delay::Random => Duration::from_micros(stream.rng.below(delay_us + 1)),
            Delay::Exactly(delay) => delay,
        };
        let clock = stream.clock.clone();
        stream.queue.push_back(Queued { seq: point.seq, after, clock: clock.clone(), delay, work: op.work });
        let found = self.order.begin(Entry { point, label: op.label, uses: op.uses, clock, over: false });
        self.violations(found);
        notify();
        Ok(point)
    }

    /// What the legacy default stream makes an op wait for.
    fn implied(&mut self, id: Handle) -> Outcome<(Vec<Point>, Clock)> {
        let Stream { device, kind, blocking, .. } = *self.streams.get_mut(id)?;
        Ok(match (kind, blocking) {
            (Kind::Legacy, _) => self.streams.ends(device, |other| other.blocking && other.kind != Kind::Legacy),
            (_, true) => self.streams.ends(device, |other| other.kind == Kind::Legacy),
            (_, false) => (Vec::new(), Clock::default()),
        })
    }
}

/// Waits until all that a stream has now is over; the host knows it then.
pub(crate) fn synchronise(mut world: Guard, id: Handle) -> Guard {
    let Some(stream) = world.streams.get(id) else { return world };
    let (end, clock) = (Point { stream: id, seq: stream.submitted }, stream.clock.clone());
    world = wait_until(world, |world| world.streams.reached(end));
    world.order.observe(&clock);
    world
}

/// The thread of a stream.
pub(crate) fn work_off(id: Handle) {
    while let Some(op) = next(id) {
        if !op.delay.is_zero() {
            thread::sleep(op.delay);
        }
        let panicked = without_panic(|| (op.work)(&op.clock)).is_none();
        let mut world = lock();
        if panicked {
            world.ledger.violation(format!("panic: in op {} of stream {id:#x}", op.seq));
        }
        if let Ok(stream) = world.streams.get_mut(id) {
            stream.completed = op.seq;
        }
        world.order.end(Point { stream: id, seq: op.seq });
        notify();
    }
}

/// Waits for the next op whose turn has come; nothing when a destroyed stream has done all of its ops.
fn next(id: Handle) -> Option<Queued> {
    let ready = |world: &World| {
        let Some(stream) = world.streams.get(id) else { return true };
        stream.queue.front().map_or(stream.ended, |op| op.after.iter().all(|point| world.streams.reached(*point)))
    };
    let mut world = wait_until(lock(), ready);
    let op = world.streams.get_mut(id).ok()?.queue.pop_front();
    if op.is_none() {
        world.streams.remove(id);
        notify();
    }
    op
}
