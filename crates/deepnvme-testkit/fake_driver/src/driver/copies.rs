//! Copies of one range, and fills.
//!
//! An asynchronous copy whose host memory no device can reach is complete when the call returns, and counted in
//! `pageable_copies`. CUDA does this only for copies to such memory. From it, CUDA only stages the bytes before it
//! returns, so the race detector misses a copy that nobody waits for. The synchronous functions work on the legacy
//! default stream.

use crate::abi::{Device, Handle, Outcome};
use crate::access::Shape;
use crate::calls::driver_calls;
use crate::operations::locate::{Located, Side};
use crate::operations::queue::{Delay, StreamOp, synchronise};
use crate::operations::stream::LEGACY;
use crate::state::DriverGuard;
use crate::state::clock::Clock;

driver_calls! {
    fn cuMemcpyHtoDAsync_v2(to: u64, from: usize, bytes: usize, stream: Handle) needs Context |state, device| {
        line(state, "cuMemcpyHtoDAsync_v2", (Side::Host(from), Side::Device(to)), bytes, (device, stream, false))
    }

    fn cuMemcpyDtoHAsync_v2(to: usize, from: u64, bytes: usize, stream: Handle) needs Context |state, device| {
        line(state, "cuMemcpyDtoHAsync_v2", (Side::Device(from), Side::Host(to)), bytes, (device, stream, false))
    }

    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle) needs Context |state, device| {
        line(state, "cuMemcpyDtoDAsync_v2", (Side::Device(from), Side::Device(to)), bytes, (device, stream, false))
    }

    fn cuMemcpyHtoD_v2(to: u64, from: usize, bytes: usize) needs Context |state, device| {
        line(state, "cuMemcpyHtoD_v2", (Side::Host(from), Side::Device(to)), bytes, (device, LEGACY, true))
    }

    fn cuMemcpyDtoH_v2(to: usize, from: u64, bytes: usize) needs Context |state, device| {
        line(state, "cuMemcpyDtoH_v2", (Side::Device(from), Side::Host(to)), bytes, (device, LEGACY, true))
    }

    fn cuMemsetD8_v2(to: u64, byte: u8, bytes: usize) needs Context |state, device| {
        fill(state, "cuMemsetD8_v2", (to, bytes), byte, (device, LEGACY))
    }

    fn cuMemsetD8Async(to: u64, byte: u8, bytes: usize, stream: Handle) needs Context |state, device| {
        fill(state, "cuMemsetD8Async", (to, bytes), byte, (device, stream))
    }
}

/// Both ends of a copy: from, to.
pub(super) type Sides = (Side, Side);
/// Where a copy is queued: the current device, the stream, and whether the call waits.
pub(super) type Where = (Device, Handle, bool);

fn line(mut state: DriverGuard, label: &'static str, (from, to): Sides, bytes: usize, at: Where) -> Outcome {
    if bytes == 0 {
        return state.stream_for_work(at.1, at.0).map(drop);
    }
    let shape = Shape::line(bytes);
    let (from, to) = (state.locate(from, shape, false)?, state.locate(to, shape, true)?);
    copy(state, label, from, to, at)
}

/// Queues a copy between ends that were found. Waits for a synchronous copy, and for one of pageable memory.
pub(super) fn copy(mut state: DriverGuard, label: &'static str, from: Located, to: Located, at: Where) -> Outcome {
    let (device, stream, waits) = at;
    let id = state.stream_for_work(stream, device)?;
    let pageable = from.pageable || to.pageable;
    if pageable && !waits {
        state.call_log.count("pageable_copies");
    }
    let uses = vec![from.used, to.used];
    let (from, to) = (from.range, to.range);
    let work = Box::new(move |_: &Clock| from.copy_to(&to));
    state.enqueue(id, StreamOp { label, uses, delay: Delay::Random, work })?;
    if waits || pageable {
        drop(synchronise(state, id));
    }
    Ok(())
}

/// Queues a fill. Like a driver, it does not wait for it, not even in the function that has no stream.
fn fill(mut state: DriverGuard, label: &'static str, to: (u64, usize), byte: u8, at: (Device, Handle)) -> Outcome {
    let id = state.stream_for_work(at.1, at.0)?;
    if to.1 == 0 {
        return Ok(());
    }
    let to = state.locate(Side::Device(to.0), Shape::line(to.1), true)?;
    let (uses, range) = (vec![to.used], to.range);
    let work = Box::new(move |_: &Clock| range.fill(byte));
    state.enqueue(id, StreamOp { label, uses, delay: Delay::Random, work }).map(drop)
}
