//! The entry checks of cuFile's functions.

use crate::abi::cufile::{DRIVER_NOT_INITIALIZED, FileOutcome, INTERNAL_ERROR};
use crate::abi::without_panic;
use crate::calls::{Needs, enter};
use crate::state::{DriverGuard, is_forked};

/// Runs a body after the entry checks. An injected code is returned unchanged.
pub(super) fn behind_gate<T>(symbol: &str, body: impl FnOnce(DriverGuard) -> FileOutcome<T>) -> FileOutcome<T> {
    if is_forked() {
        return Err(DRIVER_NOT_INITIALIZED);
    }
    let run = || {
        let (state, _) = enter(symbol, Needs::Nothing)?;
        if state.initialised { body(state) } else { Err(DRIVER_NOT_INITIALIZED) }
    };
    without_panic(run).unwrap_or(Err(INTERNAL_ERROR))
}

/// Exports functions that answer with `CUfileError_t`: `fn name(arguments) |state| { body }`.
macro_rules! cufile_calls {
    ($($(#[$note:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) |$state:pat_param| $body:block)*) => {$(
        $(#[$note])*
        // SAFETY: the name is the library's own, and nothing else in this one has it.
        #[unsafe(no_mangle)]
        #[allow(non_snake_case)]
        extern "C" fn $name($($arg: $type),*) -> $crate::abi::cufile::FileError {
            let outcome = $crate::cufile::calls::behind_gate(stringify!($name), move |$state| $body);
            $crate::abi::cufile::FileError::of(outcome)
        }
    )*};
}

pub(super) use cufile_calls;
