//! The functions for tests: faults, counters, violations, and access to device memory.
//!
//! Except for kernels, they skip the entry checks: they are not counted, have no injected faults, and need no current
//! context. In a forked child they do nothing, since the lock may be held by a thread that the child does not have.
//!
//! | counter | counts |
//! | --- | --- |
//! | `calls` | all calls, of any symbol |
//! | `captured_ops` | ops that were queued on a capturing stream, and dropped |
//! | `pageable_copies` | asynchronous copies of pageable memory, complete when the call returns |
//! | `device_synchronises` | calls of `cuCtxSynchronize` |
//! | `unaligned_io` | transfers of cuFile with an offset, size or address that is no multiple of 4096 |
//! | `unregistered_io` | transfers of cuFile whose base is not registered with `cuFileBufRegister` |
//! | `objects_left_at_release` | objects that the last release of a context destroyed |
//! | `violations` | the violations of `fake_driver_violations` |
//!
//! `state/call_log.rs` lists the points inside functions that can fail; `live` below has the kinds of objects that are
//! counted.

mod kernels;

use std::ffi::c_char;

use crate::abi::{Code, Handle, In, NOT_INITIALIZED, Out, Outcome, SUCCESS, UNKNOWN, without_panic};
use crate::access::Shape;
use crate::operations::locate::Side;
use crate::state::call_log::CallLog;
use crate::state::{DriverState, is_forked, lock};

macro_rules! control_calls {
    ($($(#[$note:meta])* fn $name:ident($($arg:ident: $type:ty),*) -> $answer:ty $body:block)*) => {$(
        $(#[$note])*
        // SAFETY: the name is the fake driver's own, and nothing else in this library has it.
        #[unsafe(no_mangle)]
        extern "C" fn $name($($arg: $type),*) -> $answer {
            $body
        }
    )*};
}

control_calls! {
    /// Makes one call of `symbol` fail with `code`, after `after_calls` more calls (0: the next).
    fn fake_driver_fail(symbol: In<c_char>, after_calls: u32, code: i32) -> () {
        with_text(&symbol, (), |state, symbol| state.call_log.fail(symbol, u64::from(after_calls), code));
    }

    /// Makes every call of `symbol` fail with `code` from now on.
    fn fake_driver_fail_always(symbol: In<c_char>, code: i32) -> () {
        with_text(&symbol, (), |state, symbol| state.call_log.fail_always(symbol, code));
    }

    /// Clears faults (including those of the environment), calls, counters and violations.
    fn fake_driver_clear() -> () {
        with((), |state| state.call_log = CallLog::default());
    }

    /// Returns the number of calls of `symbol`, including failed ones.
    fn fake_driver_calls(symbol: In<c_char>) -> u64 {
        with_text(&symbol, 0, |state, symbol| state.call_log.calls(symbol))
    }

    /// Returns the number of live objects of a kind; -1 for an unknown kind.
    fn fake_driver_live(kind: In<c_char>) -> i64 {
        with_text(&kind, -1, |state, kind| live(state, kind))
    }

    /// Returns a counter.
    fn fake_driver_count(counter: In<c_char>) -> u64 {
        with_text(&counter, 0, |state, counter| state.call_log.counted(counter))
    }

    /// Writes the violations, one per line, cut to `capacity` with a zero byte at the end. Returns the full length.
    fn fake_driver_violations(out: Out<u8>, capacity: usize) -> usize {
        let text = with(String::new(), |state| state.call_log.violations());
        if !out.is_null() && capacity > 0 {
            let bytes = text.bytes().take(capacity - 1).chain([0]);
            for (index, byte) in bytes.enumerate() {
                // The index is below the capacity, so this cannot fail.
                let _ = out.put_at(index, byte);
            }
        }
        text.len()
    }

    /// Queues a kernel that fills memory with [`crate::pattern`] after `delay_us`.
    fn fake_driver_fill_kernel(stream: Handle, to: u64, bytes: usize, seed: u64, delay_us: u64) -> Code {
        kernels::fill(stream, to, bytes, seed, delay_us)
    }

    /// Queues a kernel that copies memory after `delay_us`.
    fn fake_driver_copy_kernel(stream: Handle, to: u64, from: u64, bytes: usize, delay_us: u64) -> Code {
        kernels::copy(stream, to, from, bytes, delay_us)
    }

    /// Copies device memory to the host immediately, regardless of queued work.
    fn fake_driver_peek(from: u64, to: usize, bytes: usize) -> Code {
        at_once(|state| move_bytes(state, Side::Device(from), Side::Host(to), bytes))
    }

    /// Copies host memory to a device immediately, regardless of queued work.
    fn fake_driver_poke(to: u64, from: usize, bytes: usize) -> Code {
        at_once(|state| move_bytes(state, Side::Host(from), Side::Device(to), bytes))
    }
}

fn with<T>(otherwise: T, body: impl FnOnce(&mut DriverState) -> T) -> T {
    let answer = if is_forked() { None } else { without_panic(|| body(&mut lock())) };
    answer.unwrap_or(otherwise)
}

fn with_text<T>(text: &In<c_char>, otherwise: T, body: impl FnOnce(&mut DriverState, &str) -> T) -> T {
    let Ok(text) = text.text() else { return otherwise };
    with(otherwise, |state| body(state, &text))
}

fn at_once(body: impl FnOnce(&DriverState) -> Outcome) -> Code {
    if is_forked() {
        return NOT_INITIALIZED;
    }
    without_panic(|| body(&lock())).map_or(UNKNOWN, |outcome| outcome.err().unwrap_or(SUCCESS))
}

fn move_bytes(state: &DriverState, from: Side, to: Side, bytes: usize) -> Outcome {
    let shape = Shape::line(bytes);
    let (from, to) = (state.locate(from, shape, false)?, state.locate(to, shape, true)?);
    from.range.copy_to(&to.range);
    Ok(())
}

fn live(state: &DriverState, kind: &str) -> i64 {
    let registered = || state.host.ranges().filter(|range| range.is_registration());
    let count = match kind {
        "contexts" => state.contexts.len(),
        "streams" => state.streams.created(),
        "events" => state.events.count(),
        "device_allocations" => state.memory.of(None).count(),
        "device_bytes" => state.memory.of(None).map(|allocation| allocation.bytes).sum(),
        "registrations" => registered().count(),
        "registered_bytes" => registered().map(|range| range.bytes).sum(),
        "host_allocations" => state.host.ranges().filter(|range| !range.is_registration()).count(),
        "cufile_handles" => state.cufile.handles.len(),
        "cufile_buffers" => state.cufile.buffers.len(),
        "cufile_batches" => state.cufile.batches.len(),
        "cufile_drivers" => state.cufile.use_count as usize,
        _ => return -1,
    };
    count as i64
}
