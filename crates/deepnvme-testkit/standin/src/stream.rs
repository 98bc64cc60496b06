//! Streams: what they are, and which of them a handle means.
//!
//! `queue` has what is done with them. Default streams are made when they are first used: the legacy one for a device,
//! the other one for a device and a thread.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::thread;

use crate::abi::{Device, Handle, INVALID_HANDLE, OUT_OF_MEMORY, Outcome};
use crate::order::{Clock, Point};
use crate::queue::{Queued, work_off};
use crate::rng::Rng;
use crate::world::World;

/// `CU_STREAM_LEGACY`; the null handle means the same.
pub(crate) const LEGACY: Handle = 1;
/// `CU_STREAM_PER_THREAD`.
pub(crate) const PER_THREAD: Handle = 2;

/// Where a stream comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Created,
    Legacy,
    PerThread,
}

/// A stream, from its creation until its last op is over.
pub(crate) struct Stream {
    pub(crate) device: Device,
    pub(crate) kind: Kind,
    /// Whether it and the legacy default stream wait for each other.
    pub(crate) blocking: bool,
    /// Destroyed: no handle leads here any more, but what was queued is still done.
    pub(crate) ended: bool,
    /// The flags of `cuFileStreamRegister`, where it was called.
    pub(crate) cufile: Option<u32>,
    pub(crate) submitted: u64,
    pub(crate) completed: u64,
    pub(crate) clock: Clock,
    pub(crate) queue: VecDeque<Queued>,
    pub(crate) rng: Rng,
}

/// All streams.
#[derive(Default)]
pub(crate) struct Streams {
    all: BTreeMap<Handle, Stream>,
    defaults: HashMap<(Device, Option<thread::ThreadId>), Handle>,
}

impl Streams {
    /// The stream of an internal number.
    pub(crate) fn get(&self, id: Handle) -> Option<&Stream> {
        self.all.get(&id)
    }

    /// The stream of a number that [`World::stream`] answered with.
    pub(crate) fn get_mut(&mut self, id: Handle) -> Outcome<&mut Stream> {
        self.all.get_mut(&id).ok_or(INVALID_HANDLE)
    }

    /// A stream is gone.
    pub(crate) fn remove(&mut self, id: Handle) {
        self.all.remove(&id);
    }

    /// Whether the op at a point is over. A stream that is gone has done all of its ops.
    pub(crate) fn reached(&self, point: Point) -> bool {
        self.all.get(&point.stream).is_none_or(|stream| stream.completed >= point.seq)
    }

    /// The last points of all streams of a device that `wanted` picks.
    pub(crate) fn ends(&self, device: Device, wanted: impl Fn(&Stream) -> bool) -> (Vec<Point>, Clock) {
        let (mut points, mut clock) = (Vec::new(), Clock::default());
        for (id, stream) in self.all.iter().filter(|(_, stream)| stream.device == device && wanted(stream)) {
            points.push(Point { stream: *id, seq: stream.submitted });
            clock.join(&stream.clock);
        }
        (points, clock)
    }

    /// How many streams somebody created and has not destroyed.
    pub(crate) fn created(&self) -> usize {
        self.created_with(|_| true)
    }

    /// How many of these `wanted` picks.
    pub(crate) fn created_with(&self, wanted: impl Fn(&Stream) -> bool) -> usize {
        let created = self.all.values().filter(|stream| stream.kind == Kind::Created && !stream.ended);
        created.filter(|stream| wanted(stream)).count()
    }

    /// The default streams of a device are asked for no more.
    pub(crate) fn end_all(&mut self, device: Device) -> usize {
        let created = self.all.values().filter(|stream| stream.device == device && !stream.ended);
        let left = created.filter(|stream| stream.kind == Kind::Created).count();
        self.all.values_mut().filter(|stream| stream.device == device).for_each(|stream| stream.ended = true);
        self.defaults.retain(|(of, _), _| *of != device);
        left
    }
}

impl Stream {
    /// Whether all that was queued is over.
    pub(crate) fn is_idle(&self) -> bool {
        self.completed == self.submitted
    }
}

impl World {
    /// Makes a stream and its thread.
    pub(crate) fn create_stream(&mut self, device: Device, kind: Kind, blocking: bool) -> Outcome<Handle> {
        let id = self.handle();
        let stream = Stream {
            device,
            kind,
            blocking,
            ended: false,
            cufile: None,
            submitted: 0,
            completed: 0,
            clock: Clock::default(),
            queue: VecDeque::new(),
            rng: self.rng(id),
        };
        self.streams.all.insert(id, stream);
        let spawned = thread::Builder::new().name("standin stream".to_owned()).spawn(move || work_off(id));
        if spawned.is_err() {
            self.streams.all.remove(&id);
            return Err(OUT_OF_MEMORY);
        }
        Ok(id)
    }

    /// The stream of a handle, whatever context is current.
    pub(crate) fn stream(&mut self, handle: Handle, device: Device) -> Outcome<Handle> {
        let key = match handle {
            0 | LEGACY => (device, None),
            PER_THREAD => (device, Some(thread::current().id())),
            _ => {
                let live = |stream: &Stream| stream.kind == Kind::Created && !stream.ended;
                return self.streams.get(handle).filter(|stream| live(stream)).map(|_| handle).ok_or(INVALID_HANDLE);
            }
        };
        if let Some(id) = self.streams.defaults.get(&key) {
            return Ok(*id);
        }
        let kind = if key.1.is_some() { Kind::PerThread } else { Kind::Legacy };
        let id = self.create_stream(device, kind, true)?;
        self.streams.defaults.insert(key, id);
        Ok(id)
    }

    /// The stream of a handle, for work: it must belong to the device that is current.
    pub(crate) fn stream_for_work(&mut self, handle: Handle, device: Device) -> Outcome<Handle> {
        let id = self.stream(handle, device)?;
        if self.streams.get_mut(id)?.device == device { Ok(id) } else { Err(INVALID_HANDLE) }
    }
}
