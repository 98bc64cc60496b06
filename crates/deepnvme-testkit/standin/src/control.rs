//! The functions that only tests call: faults, counters, violations, and looking into device memory.
//!
//! They pass no gate: nothing counts them, nothing lets them fail, and no context has to be current (kernels aside).
//! In a forked child they do nothing, since the lock may be held there by a thread that the child does not have.
//!
//! | counter | what it counts |
//! | --- | --- |
//! | `pageable_copies` | asynchronous copies that had to be made at once |
//! | `device_synchronises` | calls of `cuCtxSynchronize` |
//! | `unaligned_io` | transfers of cuFile with an offset, size or address that is no multiple of 4096 |
//! | `unregistered_io` | transfers of cuFile whose base no `cuFileBufRegister` had |
//! | `objects_left_at_release` | what the last release of a context had to destroy itself |
//! | `violations` | what `standin_violations` lists |
//!
//! `ledger.rs` says which moments inside a function can fail; `live` below has the kinds of things that are counted.

use std::ffi::c_char;

use crate::abi::{Code, Handle, In, NOT_INITIALIZED, Out, Outcome, SUCCESS, UNKNOWN};
use crate::bytes::Side;
use crate::calls::without_panic;
use crate::kernels;
use crate::ledger::Ledger;
use crate::span::Shape;
use crate::world::{World, is_forked, lock};

macro_rules! control_calls {
    ($($(#[$note:meta])* fn $name:ident($($arg:ident: $type:ty),*) -> $answer:ty $body:block)*) => {$(
        $(#[$note])*
        // SAFETY: the name is the stand-in's own, and nothing else in this library has it.
        #[unsafe(no_mangle)]
        extern "C" fn $name($($arg: $type),*) -> $answer {
            $body
        }
    )*};
}

control_calls! {
    /// Lets the call of `symbol` that comes `after_calls` calls from now (0: the next) fail with `code`, once.
    fn standin_fail(symbol: In<c_char>, after_calls: u32, code: i32) -> () {
        with_text(&symbol, (), |world, symbol| world.ledger.fail(symbol, u64::from(after_calls), code));
    }

    /// Lets every call of `symbol` fail with `code` from now on.
    fn standin_fail_always(symbol: In<c_char>, code: i32) -> () {
        with_text(&symbol, (), |world, symbol| world.ledger.fail_always(symbol, code));
    }

    /// Forgets faults (those of the environment, too), calls, counters and violations.
    fn standin_clear() -> () {
        with((), |world| world.ledger = Ledger::default());
    }

    /// How often `symbol` was called, failed calls included.
    fn standin_calls(symbol: In<c_char>) -> u64 {
        with_text(&symbol, 0, |world, symbol| world.ledger.calls(symbol))
    }

    /// How many things of a kind there are; -1 for a kind that is unknown.
    fn standin_live(kind: In<c_char>) -> i64 {
        with_text(&kind, -1, |world, kind| live(world, kind))
    }

    /// What a counter stands at.
    fn standin_count(counter: In<c_char>) -> u64 {
        with_text(&counter, 0, |world, counter| world.ledger.counted(counter))
    }

    /// Writes the violations, a line for each, cut to `room` with a zero byte at the end; returns the full length.
    fn standin_violations(out: Out<u8>, room: usize) -> usize {
        let text = with(String::new(), |world| world.ledger.violations());
        if !out.is_null() && room > 0 {
            let bytes = text.bytes().take(room - 1).chain([0]);
            for (index, byte) in bytes.enumerate() {
                // There is room, so nothing can go wrong; and nobody could be told.
                let _ = out.put_at(index, byte);
            }
        }
        text.len()
    }

    /// Queues a kernel that takes `delay_us` and then fills memory with the known pattern.
    fn standin_fill_kernel(stream: Handle, to: u64, bytes: usize, seed: u64, delay_us: u64) -> Code {
        kernels::fill(stream, to, bytes, seed, delay_us)
    }

    /// Queues a kernel that takes `delay_us` and then copies memory.
    fn standin_copy_kernel(stream: Handle, to: u64, from: u64, bytes: usize, delay_us: u64) -> Code {
        kernels::copy(stream, to, from, bytes, delay_us)
    }

    /// Copies device memory to the host, at once, whatever is queued.
    fn standin_peek(from: u64, to: usize, bytes: usize) -> Code {
        at_once(|world| move_bytes(world, Side::Device(from), Side::Host(to), bytes))
    }

    /// Copies host memory to a device, at once, whatever is queued.
    fn standin_poke(to: u64, from: usize, bytes: usize) -> Code {
        at_once(|world| move_bytes(world, Side::Host(from), Side::Device(to), bytes))
    }
}

fn with<T>(otherwise: T, body: impl FnOnce(&mut World) -> T) -> T {
    let answer = if is_forked() { None } else { without_panic(|| body(&mut lock())) };
    answer.unwrap_or(otherwise)
}

fn with_text<T>(text: &In<c_char>, otherwise: T, body: impl FnOnce(&mut World, &str) -> T) -> T {
    let Ok(text) = text.text() else { return otherwise };
    with(otherwise, |world| body(world, &text))
}

fn at_once(body: impl FnOnce(&World) -> Outcome) -> Code {
    if is_forked() {
        return NOT_INITIALIZED;
    }
    without_panic(|| body(&lock())).map_or(UNKNOWN, |outcome| outcome.err().unwrap_or(SUCCESS))
}

fn move_bytes(world: &World, from: Side, to: Side, bytes: usize) -> Outcome {
    let shape = Shape::line(bytes);
    let (from, to) = (world.locate(from, shape, false)?, world.locate(to, shape, true)?);
    from.stretch.copy_to(&to.stretch);
    Ok(())
}

fn live(world: &World, kind: &str) -> i64 {
    let registered = || world.host.ranges().filter(|range| range.is_registration());
    let count = match kind {
        "contexts" => world.contexts.len(),
        "streams" => world.streams.created(),
        "events" => world.events.count(),
        "device_allocations" => world.memory.of(None).count(),
        "device_bytes" => world.memory.of(None).map(|allocation| allocation.bytes).sum(),
        "registrations" => registered().count(),
        "registered_bytes" => registered().map(|range| range.bytes).sum(),
        "host_allocations" => world.host.ranges().filter(|range| !range.is_registration()).count(),
        "cufile_handles" => world.cufile.handles.len(),
        "cufile_buffers" => world.cufile.buffers.len(),
        "cufile_batches" => world.cufile.batches.len(),
        "cufile_drivers" => world.cufile.opened as usize,
        _ => return -1,
    };
    count as i64
}
