//! Codes and structs of `cufile.h`, and the entry checks of its functions.

use std::ffi::c_int;

use crate::abi::{Code, Handle, SUCCESS};
use crate::calls::{Needs, enter, without_panic};
use crate::state::{DriverGuard, is_forked};

pub(super) const DRIVER_NOT_INITIALIZED: i32 = 5001;
pub(super) const IO_NOT_SUPPORTED: i32 = 5008;
pub(super) const CUDA_DRIVER_ERROR: i32 = 5011;
pub(super) const CUDA_POINTER_INVALID: i32 = 5012;
pub(super) const CUDA_POINTER_RANGE_ERROR: i32 = 5014;
pub(super) const CUDA_CONTEXT_MISMATCH: i32 = 5015;
pub(super) const INVALID_MAPPING_RANGE: i32 = 5017;
pub(super) const INVALID_FILE_TYPE: i32 = 5018;
pub(super) const INVALID_VALUE: i32 = 5022;
pub(super) const MEMORY_ALREADY_REGISTERED: i32 = 5023;
pub(super) const DRIVER_ALREADY_OPEN: i32 = 5026;
pub(super) const HANDLE_NOT_REGISTERED: i32 = 5027;
pub(super) const HANDLE_ALREADY_REGISTERED: i32 = 5028;
pub(super) const INTERNAL_ERROR: i32 = 5030;
pub(super) const GPU_MEMORY_PINNING_FAILED: i32 = 5036;
pub(super) const BATCH_FULL: i32 = 5037;
pub(super) const INVALID_CONTEXT_ERROR: i32 = 5047;

/// `CUfileError_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(super) struct FileError {
    err: i32,
    cu_err: Code,
}

/// The result of a body; its error is one of cuFile.
pub(super) type FileOutcome<T = ()> = Result<T, i32>;

/// The union: as wide as a pointer, and a number in its first bytes.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(8))]
pub(super) struct DescriptorOrPointer(pub(super) c_int);

/// `CU_FILE_ALLOW_COMPAT_MODE`, as a bit of the control flags.
pub(super) const ALLOW_COMPAT_MODE: u32 = 1 << 1;

/// Structs with the layout of C.
macro_rules! c_structs {
    ($($(#[$note:meta])* struct $name:ident { $($field:ident: $type:ty,)* })*) => {$(
        $(#[$note])*
        #[derive(Clone, Copy, Debug)]
        #[repr(C)]
        pub(super) struct $name {
            $(pub(super) $field: $type,)*
        }
    )*};
}

c_structs! {
    /// `CUfileDescr_t`. The union in its middle is a file descriptor here.
    struct Description {
        kind: i32,
        fd: DescriptorOrPointer,
        operations: usize,
    }

    /// `CUfileDrvProps_t`; sizes are in KiB.
    struct DriverProperties {
        major_version: u32,
        minor_version: u32,
        poll_threshold: usize,
        max_direct_io: usize,
        status_flags: u32,
        control_flags: u32,
        feature_flags: u32,
        max_cache: u32,
        per_buffer_cache: u32,
        max_pinned: u32,
        max_batch: u32,
        max_batch_timeout_ms: u32,
    }

    /// `CUfileIOParams_t`.
    struct IoParams {
        mode: i32,
        base: u64,
        file_offset: i64,
        memory_offset: i64,
        bytes: usize,
        handle: Handle,
        opcode: i32,
        cookie: usize,
    }

    /// `CUfileIOEvents_t`.
    struct IoEvent {
        cookie: usize,
        status: i32,
        result: isize,
    }
}

impl DriverProperties {
    /// In compatibility mode there is no kernel driver, so it has no version and no file system that it supports.
    pub(super) fn new(compat: bool) -> Self {
        Self {
            major_version: if compat { 0 } else { 2 },
            minor_version: if compat { 0 } else { 25 },
            poll_threshold: 4,
            max_direct_io: 16384,
            status_flags: if compat { 0 } else { 1 << 4 },
            control_flags: ALLOW_COMPAT_MODE,
            feature_flags: if compat { 0 } else { 0b1110 },
            max_cache: 131_072,
            per_buffer_cache: 1024,
            max_pinned: 33_554_432,
            max_batch: 128,
            max_batch_timeout_ms: 0,
        }
    }
}

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

/// The struct for what a body ended with. Small codes are the driver's.
pub(super) fn file_error(outcome: FileOutcome) -> FileError {
    match outcome {
        Ok(()) => FileError { err: SUCCESS, cu_err: SUCCESS },
        Err(code) if code.abs() < 5000 => FileError { err: CUDA_DRIVER_ERROR, cu_err: code },
        Err(code) => FileError { err: code.abs(), cu_err: SUCCESS },
    }
}

/// Exports functions that answer with `CUfileError_t`: `fn name(arguments) |state| { body }`.
macro_rules! cufile_calls {
    ($($(#[$note:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) |$state:pat_param| $body:block)*) => {$(
        $(#[$note])*
        // SAFETY: the name is the library's own, and nothing else in this one has it.
        #[unsafe(no_mangle)]
        #[allow(non_snake_case)]
        extern "C" fn $name($($arg: $type),*) -> $crate::cufile::abi::FileError {
            let outcome = $crate::cufile::abi::behind_gate(stringify!($name), move |$state| $body);
            $crate::cufile::abi::file_error(outcome)
        }
    )*};
}

pub(super) use cufile_calls;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structs_are_laid_out_as_the_header_has_them() {
        assert_eq!((size_of::<FileError>(), size_of::<Description>()), (8, 24));
        assert_eq!((size_of::<DriverProperties>(), size_of::<IoParams>(), size_of::<IoEvent>()), (56, 64, 24));
        assert_eq!(std::mem::offset_of!(DriverProperties, max_pinned), 44);
        assert_eq!(std::mem::offset_of!(IoParams, handle), 40);
    }
}
