//! Streams, with the queue of each.

use std::collections::{BTreeMap, HashMap};
use std::thread::ThreadId;

use super::clock::{Clock, Point, StreamId};
use super::op_queue::OpQueue;
use crate::abi::{Device, INVALID_HANDLE, Outcome};

/// The kind of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamKind {
    Created {
        /// Whether it synchronises with the legacy default stream.
        is_blocking: bool,
    },
    Legacy,
    PerThread,
}

/// A stream, from its creation until its last op is complete.
pub(crate) struct Stream {
    pub(crate) device: Device,
    pub(crate) kind: StreamKind,
    /// The handle is invalid, but queued ops still run.
    pub(crate) is_destroyed: bool,
    /// The flags of `cuFileStreamRegister`, if registered.
    pub(crate) cufile: Option<u32>,
    pub(crate) queue: OpQueue,
}

/// All streams.
#[derive(Default)]
pub(crate) struct Streams {
    all: BTreeMap<StreamId, Stream>,
    /// The default streams: the legacy one of a device, or that of a device and a thread.
    pub(crate) defaults: HashMap<(Device, Option<ThreadId>), StreamId>,
}

impl Streams {
    /// Adds a stream.
    pub(crate) fn insert(&mut self, id: StreamId, stream: Stream) {
        self.all.insert(id, stream);
    }

    /// Returns a stream.
    pub(crate) fn get(&self, id: StreamId) -> Outcome<&Stream> {
        self.all.get(&id).ok_or(INVALID_HANDLE)
    }

    /// Returns a stream, to change it.
    pub(crate) fn get_mut(&mut self, id: StreamId) -> Outcome<&mut Stream> {
        self.all.get_mut(&id).ok_or(INVALID_HANDLE)
    }

    /// Removes a stream.
    pub(crate) fn remove(&mut self, id: StreamId) {
        self.all.remove(&id);
    }

    /// Returns whether the op at a point is complete. A removed stream has run all of its ops.
    pub(crate) fn reached(&self, point: Point) -> bool {
        self.all.get(&point.stream).is_none_or(|stream| stream.queue.has_completed(point.seq))
    }

    /// Returns the last points of the streams of a device that match.
    pub(crate) fn ends(&self, device: Device, wanted: impl Fn(&Stream) -> bool) -> (Vec<Point>, Clock) {
        let (mut points, mut clock) = (Vec::new(), Clock::default());
        for (id, stream) in self.all.iter().filter(|(_, stream)| stream.device == device && wanted(stream)) {
            points.push(Point { stream: *id, seq: stream.queue.submitted() });
            clock.join(stream.queue.clock());
        }
        (points, clock)
    }

    /// Returns the number of created streams that are not destroyed.
    pub(crate) fn created(&self) -> usize {
        self.created_with(|_| true)
    }

    /// Returns the number of those that match.
    pub(crate) fn created_with(&self, wanted: impl Fn(&Stream) -> bool) -> usize {
        let created = self.all.values().filter(|stream| stream.is_created() && !stream.is_destroyed);
        created.filter(|stream| wanted(stream)).count()
    }

    /// Destroys all streams of a device. Returns how many created ones were not destroyed before.
    pub(crate) fn end_all(&mut self, device: Device) -> usize {
        let created = self.all.values().filter(|stream| stream.device == device && !stream.is_destroyed);
        let left = created.filter(|stream| stream.is_created()).count();
        self.all.values_mut().filter(|stream| stream.device == device).for_each(|stream| stream.is_destroyed = true);
        self.defaults.retain(|(of, _), _| *of != device);
        left
    }
}

impl Stream {
    pub(crate) fn is_created(&self) -> bool {
        matches!(self.kind, StreamKind::Created { .. })
    }

    /// Returns whether it synchronises with the legacy default stream.
    pub(crate) fn is_blocking(&self) -> bool {
        self.kind != StreamKind::Created { is_blocking: false }
    }

    /// Returns whether all queued ops are complete.
    pub(crate) fn is_idle(&self) -> bool {
        self.queue.has_completed(self.queue.submitted())
    }
}
