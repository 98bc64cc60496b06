//! Streams, and lookup by handle.
//!
//! `queue` runs their ops. Default streams are created on first use: the legacy one per device, the other per device
//! and thread.

use std::collections::{BTreeMap, HashMap};
use std::{fmt, thread};

use crate::abi::{Device, Handle, INVALID_HANDLE, OUT_OF_MEMORY, Outcome};
use crate::queue::{OpQueue, work_off};
use crate::race_detector::{Clock, Point};
use crate::state::DriverState;

/// `CU_STREAM_LEGACY`; the null handle means the same.
pub(crate) const LEGACY: Handle = 1;
/// `CU_STREAM_PER_THREAD`.
pub(crate) const PER_THREAD: Handle = 2;

/// A stream in the driver's table. The value of a created stream is its handle. The handles of default streams mean
/// different streams on different devices and threads, so each of these also gets a value of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct StreamId(pub(crate) Handle);

impl fmt::LowerHex for StreamId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

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
    defaults: HashMap<(Device, Option<thread::ThreadId>), StreamId>,
}

impl Streams {
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
        self.all.get(&point.stream).is_none_or(|stream| stream.queue.completed >= point.seq)
    }

    /// Returns the last points of the streams of a device that match.
    pub(crate) fn ends(&self, device: Device, wanted: impl Fn(&Stream) -> bool) -> (Vec<Point>, Clock) {
        let (mut points, mut clock) = (Vec::new(), Clock::default());
        for (id, stream) in self.all.iter().filter(|(_, stream)| stream.device == device && wanted(stream)) {
            points.push(Point { stream: *id, seq: stream.queue.submitted });
            clock.join(&stream.queue.clock);
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
        self.queue.completed == self.queue.submitted
    }
}

impl DriverState {
    /// Creates a stream and its thread.
    pub(crate) fn create_stream(&mut self, device: Device, kind: StreamKind) -> Outcome<StreamId> {
        let id = StreamId(self.handle());
        let stream = Stream { device, kind, is_destroyed: false, cufile: None, queue: OpQueue::new(self.rng(id.0)) };
        self.streams.all.insert(id, stream);
        let spawned = thread::Builder::new().name("fake_driver stream".to_owned()).spawn(move || work_off(id));
        if spawned.is_err() {
            self.streams.all.remove(&id);
            return Err(OUT_OF_MEMORY);
        }
        Ok(id)
    }

    /// Returns the stream of a handle, for any current context.
    pub(crate) fn stream(&mut self, handle: Handle, device: Device) -> Outcome<StreamId> {
        let key = match handle {
            0 | LEGACY => {
                self.captures.check_legacy(device, false)?;
                (device, None)
            }
            PER_THREAD => (device, Some(thread::current().id())),
            _ => {
                let id = StreamId(handle);
                let stream = self.streams.get(id)?;
                return if stream.is_created() && !stream.is_destroyed { Ok(id) } else { Err(INVALID_HANDLE) };
            }
        };
        if let Some(id) = self.streams.defaults.get(&key) {
            return Ok(*id);
        }
        let kind = if key.1.is_some() { StreamKind::PerThread } else { StreamKind::Legacy };
        let id = self.create_stream(device, kind)?;
        self.streams.defaults.insert(key, id);
        Ok(id)
    }

    /// Returns the stream of a handle for work. It must belong to the current device.
    pub(crate) fn stream_for_work(&mut self, handle: Handle, device: Device) -> Outcome<StreamId> {
        let id = self.stream(handle, device)?;
        if self.streams.get(id)?.device == device { Ok(id) } else { Err(INVALID_HANDLE) }
    }
}
