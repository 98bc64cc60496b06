//! Release of memory: a program must synchronise with all accesses before it frees memory.
//!
//! An early release is a violation. The call then waits for the accesses, so that the process can report it.

use crate::abi::{INVALID_VALUE, Outcome};
use crate::state::clock::Point;
use crate::state::{DriverGuard, DriverState, wait_until};

/// Releases a range: records pending accesses, waits for them, and removes them.
pub(crate) fn release_range(mut state: DriverGuard, action: &str, start: u64, bytes: usize) -> DriverGuard {
    let users: Vec<(Point, String)> = state
        .races
        .users(start, bytes)
        .map(|entry| {
            let how = if entry.over { "that nobody has waited for" } else { "that is not over" };
            let Point { stream, seq } = entry.point;
            let text = format!("lifetime: {action} of {start:#x} used by {} {how}", entry.label);
            (entry.point, format!("{text} (stream {stream:#x}, op {seq})"))
        })
        .collect();
    state.record_violations(users.iter().map(|(_, text)| text.clone()).collect());
    let over = |state: &DriverState, point: Point| {
        !state.races.users(start, bytes).any(|entry| entry.point == point && !entry.over)
    };
    state = wait_until(state, |state| users.iter().all(|(point, _)| over(state, *point)));
    state.races.forget_range(start, bytes);
    state
}

/// `cuMemFree`.
pub(crate) fn free(mut state: DriverGuard, base: u64) -> Outcome {
    let bytes = state.memory.at(base).ok_or(INVALID_VALUE)?.bytes;
    if state.cufile.buffers_in(base, bytes) {
        state.call_log.violation(format!("lifetime: cuMemFree of {base:#x}, which is registered with cuFile"));
    }
    state = release_range(state, "cuMemFree", base, bytes);
    state.memory.remove(base);
    Ok(())
}

/// `cuMemHostUnregister`.
pub(crate) fn unregister(mut state: DriverGuard, start: usize) -> Outcome {
    let bytes = state.host.registration(start)?.bytes;
    state = release_range(state, "cuMemHostUnregister", start as u64, bytes);
    state.host.remove(start);
    Ok(())
}

/// `cuMemFreeHost`.
pub(crate) fn free_host(mut state: DriverGuard, start: usize) -> Outcome {
    let bytes = state.host.allocation(start)?.bytes;
    state = release_range(state, "cuMemFreeHost", start as u64, bytes);
    state.host.remove(start);
    Ok(())
}
