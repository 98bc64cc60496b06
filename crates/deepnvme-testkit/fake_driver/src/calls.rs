//! The entry checks of the exported functions: forks, callbacks, counting, faults, initialisation, the current context,
//! captures.
//!
//! The order is that of a driver that checks its own state before the arguments.

use std::cell::Cell;

use crate::abi::{Code, Device, NOT_INITIALIZED, NOT_PERMITTED, Outcome, SUCCESS, UNKNOWN, without_panic};
use crate::state::{self, DriverGuard};

thread_local! {
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// The state that a function requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Needs {
    /// Works before `cuInit`.
    Nothing,
    /// Works after `cuInit`.
    Init,
    /// Works with a context that is current on the thread.
    Context,
}

/// Runs the body of a driver function with the lock and the current device (-1 if it needs no context).
pub(crate) fn driver(symbol: &str, needs: Needs, body: impl FnOnce(DriverGuard, Device) -> Outcome) -> Code {
    let run = || enter(symbol, needs).and_then(|(state, device)| body(state, device));
    match without_panic(run) {
        Some(Ok(())) => SUCCESS,
        Some(Err(code)) => code,
        None => UNKNOWN,
    }
}

/// Runs the entry checks.
pub(crate) fn enter(symbol: &str, needs: Needs) -> Outcome<(DriverGuard, Device)> {
    if state::is_forked() {
        return Err(NOT_INITIALIZED);
    }
    let mut state = state::lock();
    if IN_HOST_FUNCTION.get() {
        state.call_log.violation(format!("callback: a host function called {symbol}"));
        return Err(NOT_PERMITTED);
    }
    if let Some(code) = state.call_log.call(symbol) {
        return if code == SUCCESS { Err(UNKNOWN) } else { Err(code) };
    }
    if needs != Needs::Nothing && !state.initialised {
        return Err(NOT_INITIALIZED);
    }
    let device = if needs == Needs::Context { state.current()? } else { -1 };
    state.captures.check_call(symbol)?;
    Ok((state, device))
}

/// Runs a host function. Meanwhile this thread must not call the driver.
pub(crate) fn as_host_function(call: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    call();
    IN_HOST_FUNCTION.set(false);
}

/// Exports driver functions: `fn name(arguments) needs What |state, device| { body }`. The body returns an `Outcome`.
macro_rules! driver_calls {
    ($($(#[$note:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) needs $needs:ident
        |$state:pat_param, $device:pat_param| $body:block)*) => {$(
        $(#[$note])*
        // SAFETY: the symbol belongs to the driver and is unique in this library.
        #[unsafe(no_mangle)]
        #[allow(non_snake_case)]
        extern "C" fn $name($($arg: $type),*) -> $crate::abi::Code {
            $crate::calls::driver(stringify!($name), $crate::calls::Needs::$needs, move |$state, $device| $body)
        }
    )*};
}

pub(crate) use driver_calls;
