//! Retains and releases primary contexts: reference-counted, with a new handle for each creation.

use crate::abi::{CONTEXT_IS_DESTROYED, Device, Handle, INVALID_CONTEXT, Outcome};
use crate::state::clock::Point;
use crate::state::{DriverGuard, DriverState, notify, wait_until};

impl DriverState {
    /// `cuDevicePrimaryCtxRetain`.
    pub(crate) fn retain(&mut self, device: Device) -> Outcome<Handle> {
        let fresh = self.handle();
        let primary = self.device(device)?;
        primary.retained += 1;
        let context = *primary.context.get_or_insert(fresh);
        self.contexts.insert(context, device);
        Ok(context)
    }

    /// Checks that a context may become current.
    pub(crate) fn live_context(&self, context: Handle) -> Outcome {
        let known = self.contexts.contains_key(&context);
        if known { Ok(()) } else { Err(if context == 0 { INVALID_CONTEXT } else { CONTEXT_IS_DESTROYED }) }
    }

    /// Returns the context of a device, or 0.
    pub(crate) fn context_of(&self, device: Device) -> Handle {
        let primary = usize::try_from(device).ok().and_then(|index| self.devices.get(index));
        primary.and_then(|primary| primary.context).unwrap_or(0)
    }

    fn destroy(&mut self, device: Device) {
        let (streams, events) = (self.streams.end_all(device), self.events.remove_all(device));
        let allocations: Vec<_> = self.memory.of(Some(device)).map(|found| (found.base(), found.bytes)).collect();
        let ranges: Vec<_> = self.host.ranges().filter(|range| range.device == device).cloned().collect();
        for _ in 0..streams + events + allocations.len() + ranges.len() {
            self.call_log.count("objects_left_at_release");
        }
        for (base, bytes) in allocations {
            self.memory.remove(base);
            self.order.forget_range(base, bytes);
        }
        for range in ranges {
            self.host.remove(range.start);
            self.order.forget_range(range.start as u64, range.bytes);
        }
        notify();
    }
}

/// `cuDevicePrimaryCtxRelease`. The last release waits for the device and destroys the context's objects.
pub(crate) fn release(mut state: DriverGuard, device: Device) -> Outcome {
    let primary = state.device(device)?;
    if primary.retained == 0 {
        return Err(INVALID_CONTEXT);
    }
    primary.retained -= 1;
    if primary.retained > 0 {
        return Ok(());
    }
    let context = primary.context.take();
    state.contexts.retain(|handle, _| Some(*handle) != context);
    let (busy, _) = state.streams.ends(device, |stream| !stream.is_idle());
    for Point { stream, .. } in busy {
        state.call_log.violation(format!(
            "lifetime: the context of device {device} was released with work left on stream {stream:#x}"
        ));
    }
    state = synchronise(state, device);
    state.destroy(device);
    Ok(())
}

/// Waits for all streams of a device.
pub(crate) fn synchronise(state: DriverGuard, device: Device) -> DriverGuard {
    let (ends, clock) = state.streams.ends(device, |_| true);
    let mut state = wait_until(state, |state| ends.iter().all(|end| state.streams.reached(*end)));
    state.order.observe(&clock);
    state
}
