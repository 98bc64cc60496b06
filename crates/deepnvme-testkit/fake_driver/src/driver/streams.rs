//! Streams, and host functions in them.

use std::ffi::c_void;

use crate::abi::{Handle, HostFn, INVALID_HANDLE, INVALID_VALUE, NOT_READY, Out};
use crate::calls::{as_host_function, driver_calls};
use crate::operations::queue::{Delay, StreamOp, synchronise};
use crate::operations::stream::LEGACY;
use crate::state::clock::Clock;
use crate::state::stream::StreamKind;
use crate::state::{capture, lock, notify};

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;

driver_calls! {
    fn cuStreamCreate(out: Out<Handle>, flags: u32) needs Context |mut state, device| {
        if out.is_null() || flags > NON_BLOCKING {
            return Err(INVALID_VALUE);
        }
        out.put(state.create_stream(device, StreamKind::Created { is_blocking: flags != NON_BLOCKING })?.0)
    }

    fn cuStreamCreateWithPriority(out: Out<Handle>, flags: u32, _priority: i32) needs Context |mut state, device| {
        if out.is_null() || flags > NON_BLOCKING {
            return Err(INVALID_VALUE);
        }
        out.put(state.create_stream(device, StreamKind::Created { is_blocking: flags != NON_BLOCKING })?.0)
    }

    fn cuStreamDestroy_v2(stream: Handle) needs Context |mut state, device| {
        let id = state.stream(stream, device)?;
        let stream = state.streams.get_mut(id)?;
        if !stream.is_created() {
            return Err(INVALID_HANDLE);
        }
        stream.is_destroyed = true;
        if stream.cufile.is_some() {
            state.call_log.violation(format!("lifetime: stream {id:#x} was destroyed while registered with cuFile"));
        }
        notify();
        Ok(())
    }

    fn cuStreamSynchronize(stream: Handle) needs Context |mut state, device| {
        let id = state.stream(stream, device)?;
        state.captures.check_query(id)?;
        drop(synchronise(state, id));
        Ok(())
    }

    fn cuStreamQuery(stream: Handle) needs Context |mut state, device| {
        let id = state.stream(stream, device)?;
        state.captures.check_query(id)?;
        let stream = state.streams.get(id)?;
        if !stream.is_idle() {
            return Err(NOT_READY);
        }
        let clock = stream.queue.clock().clone();
        state.races.observe(&clock);
        Ok(())
    }

    fn cuStreamBeginCapture_v2(stream: Handle, mode: i32) needs Context |mut state, device| {
        let id = state.stream_for_work(stream, device)?;
        let state = &mut *state;
        state.captures.begin(id, state.streams.get(id)?, mode)
    }

    fn cuStreamEndCapture(stream: Handle, graph: Out<Handle>) needs Context |mut state, device| {
        let id = state.stream(stream, device)?;
        let ended = state.captures.end(id);
        // A graph, which nothing can launch.
        graph.put(if ended.is_ok() { state.handle() } else { 0 })?;
        ended
    }

    fn cuStreamIsCapturing(stream: Handle, status: Out<i32>) needs Context |mut state, device| {
        if stream <= LEGACY {
            state.captures.check_legacy(device, true)?;
        }
        let id = state.stream(stream, device)?;
        status.put(state.captures.status(id))
    }

    fn cuThreadExchangeStreamCaptureMode(mode: Out<i32>) needs Init |_, _| {
        mode.put(capture::exchange(mode.get()?)?)
    }

    fn cuStreamWaitEvent(stream: Handle, event: Handle, flags: u32) needs Context |mut state, device| {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let id = state.stream_for_work(stream, device)?;
        state.wait_for_event(event, id)
    }

    fn cuStreamGetCtx(stream: Handle, out: Out<Handle>) needs Context |mut state, device| {
        let id = state.stream(stream, device)?;
        let owner = state.streams.get(id)?.device;
        out.put(state.primary_context_of(owner))
    }

    fn cuLaunchHostFunc(stream: Handle, function: HostFn, data: *mut c_void) needs Context |mut state, device| {
        let function = function.ok_or(INVALID_VALUE)?;
        let id = state.stream_for_work(stream, device)?;
        let data = data.expose_provenance();
        let work = Box::new(move |before: &Clock| {
            // The function learns that all before it in its stream is over, and may tell any thread.
            lock().races.observe(before);
            // SAFETY: the caller of `cuLaunchHostFunc` promises that the function may be called with this argument
            // until its turn comes.
            as_host_function(|| unsafe { function(std::ptr::with_exposed_provenance_mut(data)) });
        });
        state.enqueue(id, StreamOp { label: "cuLaunchHostFunc", uses: Vec::new(), delay: Delay::Random, work }).map(drop)
    }
}
