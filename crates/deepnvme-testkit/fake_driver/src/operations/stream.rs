//! Creates streams, and finds them by handle.
//!
//! Default streams are created on first use: the legacy one per device, the other per device and thread.

use std::thread;

use super::queue::run_stream;
use crate::abi::{Device, Handle, INVALID_HANDLE, OUT_OF_MEMORY, Outcome};
use crate::state::DriverState;
use crate::state::clock::StreamId;
use crate::state::op_queue::OpQueue;
use crate::state::stream::{Stream, StreamKind};

/// `CU_STREAM_LEGACY`; the null handle means the same.
pub(crate) const LEGACY: Handle = 1;
/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: Handle = 2;

impl DriverState {
    /// Creates a stream and its thread.
    pub(crate) fn create_stream(&mut self, device: Device, kind: StreamKind) -> Outcome<StreamId> {
        let id = StreamId(self.handle());
        let stream = Stream { device, kind, is_destroyed: false, cufile: None, queue: OpQueue::new(self.rng(id.0)) };
        self.streams.insert(id, stream);
        let spawned = thread::Builder::new().name("fake_driver stream".to_owned()).spawn(move || run_stream(id));
        if spawned.is_err() {
            self.streams.remove(id);
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
