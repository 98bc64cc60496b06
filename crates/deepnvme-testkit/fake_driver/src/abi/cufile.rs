//! Codes and structs of `cufile.h`.

use std::ffi::c_int;

use super::{Code, Handle, SUCCESS};

pub(crate) const DRIVER_NOT_INITIALIZED: i32 = 5001;
pub(crate) const IO_NOT_SUPPORTED: i32 = 5008;
pub(crate) const CUDA_DRIVER_ERROR: i32 = 5011;
pub(crate) const CUDA_POINTER_INVALID: i32 = 5012;
pub(crate) const CUDA_POINTER_RANGE_ERROR: i32 = 5014;
pub(crate) const CUDA_CONTEXT_MISMATCH: i32 = 5015;
pub(crate) const INVALID_MAPPING_RANGE: i32 = 5017;
pub(crate) const INVALID_FILE_TYPE: i32 = 5018;
pub(crate) const INVALID_VALUE: i32 = 5022;
pub(crate) const MEMORY_ALREADY_REGISTERED: i32 = 5023;
pub(crate) const DRIVER_ALREADY_OPEN: i32 = 5026;
pub(crate) const HANDLE_NOT_REGISTERED: i32 = 5027;
pub(crate) const HANDLE_ALREADY_REGISTERED: i32 = 5028;
pub(crate) const INTERNAL_ERROR: i32 = 5030;
pub(crate) const GPU_MEMORY_PINNING_FAILED: i32 = 5036;
pub(crate) const BATCH_FULL: i32 = 5037;
pub(crate) const INVALID_CONTEXT_ERROR: i32 = 5047;

/// `CUfileError_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct FileError {
    err: i32,
    cu_err: Code,
}

/// The result of a body; its error is one of cuFile.
pub(crate) type FileOutcome<T = ()> = Result<T, i32>;

/// The union: as wide as a pointer, and a number in its first bytes.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(8))]
pub(crate) struct DescriptorOrPointer(pub(crate) c_int);

/// `CU_FILE_ALLOW_COMPAT_MODE`, as a bit of the control flags.
pub(crate) const ALLOW_COMPAT_MODE: u32 = 1 << 1;

/// Structs with the layout of C.
macro_rules! c_structs {
    ($($(#[$note:meta])* struct $name:ident { $($field:ident: $type:ty,)* })*) => {$(
        $(#[$note])*
        #[derive(Clone, Copy, Debug)]
        #[repr(C)]
        pub(crate) struct $name {
            $(pub(crate) $field: $type,)*
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

impl FileError {
    /// Returns the struct for the result of a body. Small codes are the driver's.
    pub(crate) fn of(outcome: FileOutcome) -> Self {
        match outcome {
            Ok(()) => Self { err: SUCCESS, cu_err: SUCCESS },
            Err(code) if code.abs() < 5000 => Self { err: CUDA_DRIVER_ERROR, cu_err: code },
            Err(code) => Self { err: code.abs(), cu_err: SUCCESS },
        }
    }
}

impl DriverProperties {
    /// In compatibility mode there is no kernel driver, so it has no version and no file system that it supports.
    pub(crate) fn new(compat: bool) -> Self {
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
