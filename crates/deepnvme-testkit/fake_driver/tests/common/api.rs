//! The exported functions, looked up in a loaded fake driver, with the signatures of the C headers.

use std::ffi::{c_char, c_long, c_void};

use libloading::Library;

/// Structs with the layout of C.
macro_rules! c_structs {
    ($($(#[$note:meta])* struct $name:ident { $($field:ident: $type:ty,)* })*) => {$(
        $(#[$note])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[repr(C)]
        pub(crate) struct $name {
            $(pub(crate) $field: $type,)*
        }
    )*};
}

c_structs! {
    /// `CUfileError_t`.
    struct FileError {
        err: i32,
        cu_err: i32,
    }

    /// `CUDA_MEMCPY2D`.
    struct Memcpy2D {
        src_x: usize,
        src_y: usize,
        src_type: u32,
        src_host: usize,
        src_device: u64,
        src_array: usize,
        src_pitch: usize,
        dst_x: usize,
        dst_y: usize,
        dst_type: u32,
        dst_host: usize,
        dst_device: u64,
        dst_array: usize,
        dst_pitch: usize,
        width: usize,
        height: usize,
    }

    /// `CUfileDescr_t`.
    struct Description {
        kind: i32,
        fd: i64,
        operations: usize,
    }

    /// `CUfileIOParams_t`.
    struct IoParams {
        mode: i32,
        base: u64,
        file_offset: i64,
        memory_offset: i64,
        bytes: usize,
        handle: u64,
        opcode: i32,
        cookie: usize,
    }

    /// `CUfileIOEvents_t`.
    struct IoEvent {
        cookie: usize,
        status: i32,
        result: isize,
    }

    /// `CUfileDrvProps_t`.
    struct DriverProperties {
        major: u32,
        minor: u32,
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
}

macro_rules! api {
    ($($name:ident($($arg:ty),*) $(-> $answer:ty)?;)*) => {
        /// The functions. They are declared safe, since the tests pass the arguments that the headers require.
        #[allow(non_snake_case)]
        pub(crate) struct Api {
            $(pub(crate) $name: extern "C" fn($($arg),*) $(-> $answer)?,)*
        }

        impl Api {
            /// Looks all of them up; a library that lacks one is no fake driver.
            pub(crate) fn of(library: &Library) -> Self {
                // SAFETY: the types are those of the headers, and the library is never unloaded.
                unsafe { Self { $($name: *library.get(concat!(stringify!($name), "\0").as_bytes()).unwrap(),)* } }
            }
        }
    };
}

api! {
    cuInit(u32) -> i32;
    cuDriverGetVersion(&mut i32) -> i32;
    cuGetErrorName(i32, &mut *const c_char) -> i32;
    cuGetErrorString(i32, &mut *const c_char) -> i32;
    cuDeviceGetCount(&mut i32) -> i32;
    cuDeviceGet(&mut i32, i32) -> i32;
    cuDeviceGetName(*mut u8, i32, i32) -> i32;
    cuDeviceGetAttribute(&mut i32, i32, i32) -> i32;
    cuDeviceGetPCIBusId(*mut u8, i32, i32) -> i32;
    cuDeviceTotalMem_v2(&mut usize, i32) -> i32;
    cuDeviceGetUuid(&mut [u8; 16], i32) -> i32;
    cuDeviceGetUuid_v2(&mut [u8; 16], i32) -> i32;
    cuDevicePrimaryCtxRetain(&mut u64, i32) -> i32;
    cuDevicePrimaryCtxRelease_v2(i32) -> i32;
    cuDevicePrimaryCtxGetState(i32, &mut u32, &mut i32) -> i32;
    cuCtxPushCurrent_v2(u64) -> i32;
    cuCtxPopCurrent_v2(&mut u64) -> i32;
    cuCtxGetCurrent(&mut u64) -> i32;
    cuCtxSetCurrent(u64) -> i32;
    cuCtxGetDevice(&mut i32) -> i32;
    cuCtxSynchronize() -> i32;
    cuCtxGetStreamPriorityRange(&mut i32, &mut i32) -> i32;
    cuMemAlloc_v2(&mut u64, usize) -> i32;
    cuMemFree_v2(u64) -> i32;
    cuMemGetRegistrableRange_v2(&mut u64, &mut usize, u64) -> i32;
    cuMemGetInfo_v2(&mut usize, &mut usize) -> i32;
    cuMemHostRegister_v2(usize, usize, u32) -> i32;
    cuMemHostUnregister(usize) -> i32;
    cuMemHostAlloc(&mut usize, usize, u32) -> i32;
    cuMemFreeHost(usize) -> i32;
    cuPointerGetAttribute(*mut c_void, i32, u64) -> i32;
    cuPointerGetAttributes(u32, *const i32, *const *mut c_void, u64) -> i32;
    cuMemcpyHtoDAsync_v2(u64, usize, usize, u64) -> i32;
    cuMemcpyDtoHAsync_v2(usize, u64, usize, u64) -> i32;
    cuMemcpyDtoDAsync_v2(u64, u64, usize, u64) -> i32;
    cuMemcpy2DAsync_v2(&Memcpy2D, u64) -> i32;
    cuMemcpyHtoD_v2(u64, usize, usize) -> i32;
    cuMemcpyDtoH_v2(usize, u64, usize) -> i32;
    cuMemsetD8_v2(u64, u8, usize) -> i32;
    cuMemsetD8Async(u64, u8, usize, u64) -> i32;
    cuStreamCreate(&mut u64, u32) -> i32;
    cuStreamCreateWithPriority(&mut u64, u32, i32) -> i32;
    cuStreamDestroy_v2(u64) -> i32;
    cuStreamSynchronize(u64) -> i32;
    cuStreamQuery(u64) -> i32;
    cuStreamBeginCapture_v2(u64, i32) -> i32;
    cuStreamEndCapture(u64, &mut u64) -> i32;
    cuStreamIsCapturing(u64, &mut i32) -> i32;
    cuThreadExchangeStreamCaptureMode(&mut i32) -> i32;
    cuStreamWaitEvent(u64, u64, u32) -> i32;
    cuStreamGetCtx(u64, &mut u64) -> i32;
    cuLaunchHostFunc(u64, extern "C" fn(*mut c_void), *mut c_void) -> i32;
    cuEventCreate(&mut u64, u32) -> i32;
    cuEventDestroy_v2(u64) -> i32;
    cuEventRecord(u64, u64) -> i32;
    cuEventQuery(u64) -> i32;
    cuEventSynchronize(u64) -> i32;
    cuEventElapsedTime(&mut f32, u64, u64) -> i32;
    cuEventElapsedTime_v2(&mut f32, u64, u64) -> i32;
    cuFileDriverOpen() -> FileError;
    cuFileDriverClose() -> FileError;
    cuFileDriverClose_v2() -> FileError;
    cuFileUseCount() -> c_long;
    cuFileDriverGetProperties(&mut DriverProperties) -> FileError;
    cuFileDriverSetPollMode(bool, usize) -> FileError;
    cuFileDriverSetMaxDirectIOSize(usize) -> FileError;
    cuFileDriverSetMaxCacheSize(usize) -> FileError;
    cuFileDriverSetMaxPinnedMemSize(usize) -> FileError;
    cuFileGetVersion(&mut i32) -> FileError;
    cuFileSetParameterBool(i32, bool) -> FileError;
    cuFileSetStatsLevel(i32) -> FileError;
    cuFileGetStatsLevel(&mut i32) -> FileError;
    cuFileStatsStart() -> FileError;
    cuFileStatsStop() -> FileError;
    cuFileStatsReset() -> FileError;
    cuFileGetStatsL3(*mut u64) -> FileError;
    cuFileHandleRegister(&mut u64, &Description) -> FileError;
    cuFileHandleDeregister(u64);
    cuFileBufRegister(u64, usize, i32) -> FileError;
    cuFileBufDeregister(u64) -> FileError;
    cuFileRead(u64, u64, usize, i64, i64) -> isize;
    cuFileWrite(u64, u64, usize, i64, i64) -> isize;
    cuFileBatchIOSetUp(&mut u64, u32) -> FileError;
    cuFileBatchIOSubmit(u64, u32, *const IoParams, u32) -> FileError;
    cuFileBatchIOGetStatus(u64, u32, &mut u32, *mut IoEvent, *const libc::timespec) -> FileError;
    cuFileBatchIOCancel(u64) -> FileError;
    cuFileBatchIODestroy(u64);
    cuFileReadAsync(u64, u64, *mut usize, *mut i64, *mut i64, *mut isize, u64) -> FileError;
    cuFileWriteAsync(u64, u64, *mut usize, *mut i64, *mut i64, *mut isize, u64) -> FileError;
    cuFileStreamRegister(u64, u32) -> FileError;
    cuFileStreamDeregister(u64) -> FileError;
    fake_driver_fail(*const c_char, u32, i32);
    fake_driver_fail_always(*const c_char, i32);
    fake_driver_clear();
    fake_driver_calls(*const c_char) -> u64;
    fake_driver_live(*const c_char) -> i64;
    fake_driver_count(*const c_char) -> u64;
    fake_driver_violations(*mut u8, usize) -> usize;
    fake_driver_fill_kernel(u64, u64, usize, u64, u64) -> i32;
    fake_driver_copy_kernel(u64, u64, u64, usize, u64) -> i32;
    fake_driver_peek(u64, usize, usize) -> i32;
    fake_driver_poke(u64, usize, usize) -> i32;
}
