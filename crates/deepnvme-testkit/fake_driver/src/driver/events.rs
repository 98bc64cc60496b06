//! Events.

use crate::abi::{Handle, INVALID_VALUE, Out};
use crate::calls::driver_calls;
use crate::operations::event::{DISABLE_TIMING, synchronise};

/// `CU_EVENT_INTERPROCESS`, which asks for an event without timing.
const INTERPROCESS: u32 = 4;
const KNOWN_FLAGS: u32 = 7;

driver_calls! {
    fn cuEventCreate(out: Out<Handle>, flags: u32) needs Context |mut state, device| {
        let untimed = flags & DISABLE_TIMING != 0;
        if out.is_null() || flags & !KNOWN_FLAGS != 0 || (flags & INTERPROCESS != 0 && !untimed) {
            return Err(INVALID_VALUE);
        }
        out.put(state.create_event(device, flags))
    }

    fn cuEventDestroy_v2(event: Handle) needs Context |mut state, _| {
        state.events.remove(event)
    }

    fn cuEventRecord(event: Handle, stream: Handle) needs Context |mut state, device| {
        let id = state.stream_for_work(stream, device)?;
        state.record(event, id)
    }

    fn cuEventQuery(event: Handle) needs Context |mut state, _| {
        state.query_event(event)
    }

    fn cuEventSynchronize(event: Handle) needs Context |state, _| {
        synchronise(state, event)
    }

    fn cuEventElapsedTime(out: Out<f32>, start: Handle, end: Handle) needs Context |state, _| {
        out.put(state.elapsed_ms(start, end)?)
    }

    fn cuEventElapsedTime_v2(out: Out<f32>, start: Handle, end: Handle) needs Context |state, _| {
        out.put(state.elapsed_ms(start, end)?)
    }
}
