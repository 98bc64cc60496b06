//! Streams, and lookup by handle.
//!
//! `queue` runs their ops. Default streams are created on first use: the legacy one per device, the other per device
//! and thread.

use std::collections::{BTreeMap, HashMap};
use std::thread;

use crate::abi::{Device, Handle, INVALID_HANDLE, OUT_OF_MEMORY, Outcome};
use crate::queue::{OpQueue, work_off};
use crate::race_detector::{Clock, Point};
use crate::state::DriverState;

/// `CU_STREAM_LEGACY`; the null handle means the same.
pub(crate) const LEGACY: Handle = 1;
/// `CU_STREAM_PER_THREAD`.
pub(crate) const PER_THREAD: Handle = 2;

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
    /// Destroyed: the handle is invalid, but queued ops still run.
    pub(crate) ended: bool,
    /// The flags of `cuFileStreamRegister`, if registered.
    pub(crate) cufile: Option<u32>,
    pub(crate) queue: OpQueue,
}

/// All streams.
#[derive(Default)]
pub(crate) struct Streams {
    all: BTreeMap<Handle, Stream>,
    defaults: HashMap<(Device, Option<thread::ThreadId>), Handle>,
}

impl Streams {
    /// Returns a stream by its internal number.
    pub(crate) fn get(&self, id: Handle) -> Option<&Stream> {
        self.all.get(&id)
    }

    /// Returns a stream by the number from [`DriverState::stream`].
    pub(crate) fn get_mut(&mut self, id: Handle) -> Outcome<&mut Stream> {
        self.all.get_mut(&id).ok_or(INVALID_HANDLE)
    }

    /// Removes a stream.
    pub(crate) fn remove(&mut self, id: Handle) {
        self.all.remove(&id);
    }

    /// Whether the op at a point is complete. A removed stream has run all of its ops.
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
        let created = self.all.values().filter(|stream| stream.is_created() && !stream.ended);
        created.filter(|stream| wanted(stream)).count()
    }

    /// Destroys all streams of a device. Returns how many created ones were not destroyed before.
    pub(crate) fn end_all(&mut self, device: Device) -> usize {
        let created = self.all.values().filter(|stream| stream.device == device && !stream.ended);
        let left = created.filter(|stream| stream.is_created()).count();
        self.all.values_mut().filter(|stream| stream.device == device).for_each(|stream| stream.ended = true);
        self.defaults.retain(|(of, _), _| *of != device);
        left
    }
}

impl Stream {
    pub(crate) fn is_created(&self) -> bool {
        matches!(self.kind, StreamKind::Created { .. })
    }

    /// Whether it synchronises with the legacy default stream.
    pub(crate) fn is_blocking(&self) -> bool {
        self.kind != StreamKind::Created { is_blocking: false }
    }

    /// Whether all queued ops are complete.
    pub(crate) fn is_idle(&self) -> bool {
        self.queue.completed == self.queue.submitted
    }
}

impl DriverState {
    /// Creates a stream and its thread.
    pub(crate) fn create_stream(&mut self, device: Device, kind: StreamKind) -> Outcome<Handle> {
        let id = self.handle();
        let stream = Stream { device, kind, ended: false, cufile: None, queue: OpQueue::new(self.rng(id)) };
        self.streams.all.insert(id, stream);
        let spawned = thread::Builder::new().name("fake_driver stream".to_owned()).spawn(move || work_off(id));
        if spawned.is_err() {
            self.streams.all.remove(&id);
            return Err(OUT_OF_MEMORY);
        }
        Ok(id)
    }

    /// Returns the stream of a handle, for any current context.
    pub(crate) fn stream(&mut self, handle: Handle, device: Device) -> Outcome<Handle> {
        let key = match handle {
            0 | LEGACY => {
                self.captures.check_legacy(device, false)?;
                (device, None)
            }
            PER_THREAD => (device, Some(thread::current().id())),
            _ => {
                let live = |stream: &Stream| stream.is_created() && !stream.ended;
                return self.streams.get(handle).filter(|stream| live(stream)).map(|_| handle).ok_or(INVALID_HANDLE);
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
    pub(crate) fn stream_for_work(&mut self, handle: Handle, device: Device) -> Outcome<Handle> {
        let id = self.stream(handle, device)?;
        if self.streams.get_mut(id)?.device == device { Ok(id) } else { Err(INVALID_HANDLE) }
    }
}
