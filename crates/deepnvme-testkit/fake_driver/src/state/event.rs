//! Events: the latest record of each, as a point in a stream and its predecessors.

use std::collections::BTreeMap;
use std::time::Instant;

use super::clock::{Clock, Point};
use crate::abi::{Device, Handle, INVALID_HANDLE, Outcome};

/// An event.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    pub(crate) device: Device,
    pub(crate) flags: u32,
    /// The latest record. An event without one is complete.
    pub(crate) record: Option<Record>,
}

/// The point of a stream that an event represents.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    pub(crate) point: Point,
    /// The clock of the point.
    pub(crate) clock: Clock,
    /// When the stream reached it.
    pub(crate) time: Option<Instant>,
}

/// All events.
#[derive(Debug, Default)]
pub(crate) struct Events(BTreeMap<Handle, Event>);

impl Events {
    /// Adds an event without a record.
    pub(crate) fn insert(&mut self, handle: Handle, device: Device, flags: u32) {
        self.0.insert(handle, Event { device, flags, record: None });
    }

    /// Returns a live event.
    pub(crate) fn get(&self, handle: Handle) -> Outcome<&Event> {
        self.0.get(&handle).ok_or(INVALID_HANDLE)
    }

    /// Returns a live event, to change it.
    pub(crate) fn get_mut(&mut self, handle: Handle) -> Outcome<&mut Event> {
        self.0.get_mut(&handle).ok_or(INVALID_HANDLE)
    }

    /// Destroys an event. Queued work continues.
    pub(crate) fn remove(&mut self, handle: Handle) -> Outcome {
        self.0.remove(&handle).map(drop).ok_or(INVALID_HANDLE)
    }

    /// Destroys all events of a device. Returns their number.
    pub(crate) fn remove_all(&mut self, device: Device) -> usize {
        let before = self.0.len();
        self.0.retain(|_, event| event.device != device);
        before - self.0.len()
    }

    /// Returns the number of events.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }
}
