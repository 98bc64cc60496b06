//! Retains and releases primary contexts: reference-counted, with a new handle for each creation.

use crate::abi::{CONTEXT_IS_DESTROYED, Device, Handle, INVALID_CONTEXT, Outcome};
use crate::state::clock::Point;
use crate::state::{DriverGuard, DriverState, notify, wait_until};

impl DriverState {
    /// `cuDevicePrimaryCtxRetain`.
    pub(crate) fn retain_primary_context(&mut self, device: Device) -> Outcome<Handle> {
        let new_handle = self.handle();
        let primary = self.device(device)?;
        primary.retain_count += 1;
        let handle = *primary.handle.get_or_insert(new_handle);
        self.contexts.insert(handle, device);
        Ok(handle)
    }

    /// Checks that a context may become current.
    pub(crate) fn check_live_context(&self, context: Handle) -> Outcome {
        let is_live = self.contexts.contains_key(&context);
        if is_live { Ok(()) } else { Err(if context == 0 { INVALID_CONTEXT } else { CONTEXT_IS_DESTROYED }) }
    }

    /// Returns the primary context of a device, or 0 if none is live.
    pub(crate) fn primary_context_of(&self, device: Device) -> Handle {
        let primary = usize::try_from(device).ok().and_then(|index| self.devices.get(index));
        primary.and_then(|primary| primary.handle).unwrap_or(0)
    }

    /// Destroys what the program has left in the context of a device, and counts it.
    fn destroy_objects(&mut self, device: Device) {
        let (streams, events) = (self.streams.end_all(device), self.events.remove_all(device));
        let allocations: Vec<_> =
            self.memory.of(Some(device)).map(|allocation| (allocation.base(), allocation.bytes)).collect();
        let ranges: Vec<_> = self.host.ranges().filter(|range| range.device == device).cloned().collect();
        for _ in 0..streams + events + allocations.len() + ranges.len() {
            self.call_log.count("objects_left_at_release");
        }
        for (base, bytes) in allocations {
            self.memory.remove(base);
            self.races.forget_range(base, bytes);
        }
        for range in ranges {
            self.host.remove(range.start);
            self.races.forget_range(range.start as u64, range.bytes);
        }
        notify();
    }
}

/// `cuDevicePrimaryCtxRelease`. The last release waits for the device and destroys the context's objects.
pub(crate) fn release_primary_context(mut state: DriverGuard, device: Device) -> Outcome {
    let primary = state.device(device)?;
    if primary.retain_count == 0 {
        return Err(INVALID_CONTEXT);
    }
    primary.retain_count -= 1;
    if primary.retain_count > 0 {
        return Ok(());
    }
    let destroyed = primary.handle.take();
    state.contexts.retain(|handle, _| Some(*handle) != destroyed);
    let (busy, _) = state.streams.ends(device, |stream| !stream.is_idle());
    for Point { stream, .. } in busy {
        state.call_log.violation(format!(
            "lifetime: the context of device {device} was released with work left on stream {stream:#x}"
        ));
    }
    state = synchronise_device(state, device);
    state.destroy_objects(device);
    Ok(())
}

/// Waits for all streams of a device.
pub(crate) fn synchronise_device(state: DriverGuard, device: Device) -> DriverGuard {
    let (ends, clock) = state.streams.ends(device, |_| true);
    let mut state = wait_until(state, |state| ends.iter().all(|end| state.streams.reached(*end)));
    state.races.observe(&clock);
    state
}
