//! The gate of every exported function: forks, callbacks, counting, faults, initialisation, the current context.
//!
//! The order is that of a driver that looks at its own state before it looks at arguments. No panic passes.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::abi::{Code, Device, Handle, NOT_INITIALIZED, NOT_PERMITTED, Outcome, SUCCESS, UNKNOWN};
use crate::world::{self, Guard};

thread_local! {
    static CONTEXTS: RefCell<Vec<Handle>> = const { RefCell::new(Vec::new()) };
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// What a function asks for before it does anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Needs {
    /// Works before `cuInit`.
    Nothing,
    /// Works after `cuInit`.
    Init,
    /// Works with a context that is current on the thread.
    Context,
}

/// Runs the body of a driver function. It gets the lock and the current device (-1 where it asks for no context).
pub(crate) fn driver(symbol: &str, needs: Needs, body: impl FnOnce(Guard, Device) -> Outcome) -> Code {
    let run = || enter(symbol, needs).and_then(|(world, device)| body(world, device));
    match without_panic(run) {
        Some(Ok(())) => SUCCESS,
        Some(Err(code)) => code,
        None => UNKNOWN,
    }
}

/// Passes the gate.
pub(crate) fn enter(symbol: &str, needs: Needs) -> Outcome<(Guard, Device)> {
    if world::is_forked() {
        return Err(NOT_INITIALIZED);
    }
    let mut world = world::lock();
    if IN_HOST_FUNCTION.get() {
        world.ledger.violation(format!("callback: a host function called {symbol}"));
        return Err(NOT_PERMITTED);
    }
    if let Some(code) = world.ledger.call(symbol) {
        return if code == SUCCESS { Err(UNKNOWN) } else { Err(code) };
    }
    if needs != Needs::Nothing && !world.initialised {
        return Err(NOT_INITIALIZED);
    }
    let device = if needs == Needs::Context { world.current()? } else { -1 };
    Ok((world, device))
}

/// What the body ended with, or nothing where it panicked; the panic has been printed by then.
pub(crate) fn without_panic<T>(body: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(body)).ok()
}

/// Runs a host function, during which this thread may call nothing.
pub(crate) fn as_host_function(call: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    call();
    IN_HOST_FUNCTION.set(false);
}

/// The context on top of this thread's stack.
pub(crate) fn current_context() -> Option<Handle> {
    CONTEXTS.with_borrow(|stack| stack.last().copied())
}

/// Changes this thread's stack of contexts.
pub(crate) fn with_contexts<T>(change: impl FnOnce(&mut Vec<Handle>) -> T) -> T {
    CONTEXTS.with_borrow_mut(change)
}

/// Exports driver functions: `fn name(arguments) needs What |world, device| { body }`. The body returns an `Outcome`.
macro_rules! driver_calls {
    ($($(#[$note:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) needs $needs:ident
        |$world:pat_param, $device:pat_param| $body:block)*) => {$(
        $(#[$note])*
        // SAFETY: the name is the driver's own, and nothing else in this library has it.
        #[unsafe(no_mangle)]
        #[allow(non_snake_case)]
        extern "C" fn $name($($arg: $type),*) -> $crate::abi::Code {
            $crate::calls::driver(stringify!($name), $crate::calls::Needs::$needs, move |$world, $device| $body)
        }
    )*};
}

pub(crate) use driver_calls;
