//! Functions and structs of cuFile's batch API, from `cufile.h`.

use std::ffi::{c_int, c_void};
use std::time::Duration;

use libloading::Library;

use super::error::{IoError, IoResult, Status};
use crate::abi::Handle;
use crate::library::function_table;

/// The first version whose batches are known to work (CUDA 12.1): 1000 times the major version plus 10 times the
/// minor version.
const VERSION_MIN: c_int = 1060;

/// `CUfileIOParams_t`, whose union has one member.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Parameters {
    pub(super) mode: c_int,
    pub(super) base: *mut c_void,
    pub(super) file_offset: i64,
    pub(super) memory_offset: i64,
    pub(super) bytes: usize,
    pub(super) handle: Handle,
    pub(super) opcode: c_int,
    pub(super) cookie: *mut c_void,
}

/// `CUfileIOEvents_t`. The header declares the result unsigned, and documents negative errors.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Event {
    pub(super) cookie: *mut c_void,
    pub(super) status: c_int,
    pub(super) result: isize,
}

/// `struct timespec` of 64-bit Linux.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Timespec {
    pub(super) seconds: i64,
    pub(super) nanoseconds: i64,
}

impl From<Duration> for Timespec {
    fn from(time: Duration) -> Self {
        let seconds = i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
        Self { seconds, nanoseconds: i64::from(time.subsec_nanos()) }
    }
}

/// `CUFILE_BATCH`.
pub(super) const MODE: c_int = 1;
/// `CUFILE_READ` and `CUFILE_WRITE`.
pub(super) const READ: c_int = 0;
pub(super) const WRITE: c_int = 1;
/// `CUfileStatus_t`: states of transfers in progress, and final ones. Zero is an event that the library did not fill.
const NONE: c_int = 0;
const WAITING: c_int = 1;
const PENDING: c_int = 2;
const CANCELED: c_int = 8;
const COMPLETE: c_int = 16;

function_table! {
    /// The functions of batches.
    pub(super) struct Functions {
        set_up = b"cuFileBatchIOSetUp\0" (*mut Handle, u32) -> Status;
        submit = b"cuFileBatchIOSubmit\0" (Handle, u32, *mut Parameters, u32) -> Status;
        status = b"cuFileBatchIOGetStatus\0" (Handle, u32, *mut u32, *mut Event, *mut Timespec) -> Status;
        cancel = b"cuFileBatchIOCancel\0" (Handle) -> Status;
        destroy = b"cuFileBatchIODestroy\0" (Handle);
    }
}

impl Functions {
    /// Returns the functions of a library that has them all, and whose batches are known to work.
    ///
    /// # Safety
    /// The library is cuFile.
    pub(super) unsafe fn known_to_work(library: &Library) -> Option<Self> {
        type Version = unsafe extern "C" fn(*mut c_int) -> Status;
        // SAFETY: the declared types are those of cufile.h, and the caller of `known_to_work` passes no library but
        // cuFile.
        unsafe {
            let version = library.get::<Version>(b"cuFileGetVersion\0").ok()?;
            let mut number = 0;
            if version(&raw mut number).code != 0 || number < VERSION_MIN {
                return None;
            }
            Self::of(library).ok()
        }
    }
}

impl Event {
    /// Returns the result of a completed transfer; `None` while it is in progress.
    pub(super) fn outcome(self) -> Option<IoResult> {
        match self.status {
            NONE | WAITING | PENDING => None,
            COMPLETE if self.result >= 0 => Some(Ok(self.result as usize)),
            CANCELED => Some(Err(IoError::CuFile(0, "the batch was cancelled"))),
            _ => Some(Err(IoError::of_code(self.result))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;
    use std::ptr;

    use super::*;

    #[test]
    fn structs_match_the_header() {
        assert_eq!((size_of::<Parameters>(), size_of::<Event>()), (64, 24));
        assert_eq!((offset_of!(Parameters, base), offset_of!(Parameters, handle)), (8, 40));
        assert_eq!((offset_of!(Parameters, opcode), offset_of!(Parameters, cookie)), (48, 56));
        assert_eq!((offset_of!(Event, status), offset_of!(Event, result)), (8, 16));
    }

    #[test]
    fn events_have_outcomes() {
        let outcome = |status, result| Event { cookie: ptr::null_mut(), status, result }.outcome();
        assert!(outcome(NONE, 0).is_none() && outcome(WAITING, 0).is_none() && outcome(PENDING, 0).is_none());
        assert_eq!(outcome(COMPLETE, 4096).unwrap().unwrap(), 4096);
        assert!(matches!(outcome(64, -5).unwrap(), Err(IoError::Kernel(5))));
        assert!(matches!(outcome(64, -5012).unwrap(), Err(IoError::CuFile(5012, _))));
        assert!(matches!(outcome(COMPLETE, -28).unwrap(), Err(IoError::Kernel(28))));
        assert!(matches!(outcome(64, 0).unwrap(), Err(IoError::Kernel(5))), "failed, and does not say why");
        assert!(matches!(outcome(64, 8192).unwrap(), Err(IoError::Kernel(5))), "bytes are no code of cuFile");
        assert!(matches!(outcome(CANCELED, 0).unwrap(), Err(IoError::CuFile(..))));
    }
}
