//! Functions and structs of cuFile, from `cufile.h`.

use std::ffi::{c_int, c_void};

use libloading::Library;

use super::batch_functions;
use super::error::Status;
use super::statistics_functions;
use crate::abi::Handle;

/// `CUfileDescr_t`: a file descriptor of Linux.
#[repr(C)]
#[derive(Debug)]
pub(super) struct FileDescription {
    kind: c_int,
    descriptor: Descriptor,
    operations: *const c_void,
}

/// A union with a pointer; the descriptor is its first bytes.
#[repr(C, align(8))]
#[derive(Debug)]
struct Descriptor(c_int);

impl FileDescription {
    /// `CU_FILE_HANDLE_TYPE_OPAQUE_FD`.
    const OPAQUE_FD: c_int = 1;

    pub(super) const fn of(descriptor: c_int) -> Self {
        Self { kind: Self::OPAQUE_FD, descriptor: Descriptor(descriptor), operations: std::ptr::null() }
    }
}

/// `CUfileDrvProps_t`; sizes are in KiB.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct Properties {
    major_version: u32,
    minor_version: u32,
    poll_threshold: usize,
    max_direct_io: usize,
    file_systems: u32,
    control: u32,
    features: u32,
    max_cache: u32,
    per_buffer_cache: u32,
    max_pinned: u32,
    max_batch: u32,
    max_batch_timeout_ms: u32,
    // Space for the fields of later versions.
    _later_fields: [u64; 8],
}

impl Properties {
    /// `CU_FILE_P2P_SUPPORTED` as a feature bit: the kernel's own peer-to-peer transfers, without nvidia-fs.
    const PEER_TO_PEER: u32 = 1 << 4;

    /// `CU_FILE_ALLOW_COMPAT_MODE` as a control bit: files without a direct path are copied through the host.
    const ALLOW_COMPATIBILITY: u32 = 1 << 1;

    pub(super) fn version(&self) -> (u32, u32) {
        (self.major_version, self.minor_version)
    }

    /// Returns the largest transfer that cuFile passes to the kernel module, in bytes.
    pub(super) fn transfer_bytes_max(&self) -> u64 {
        self.max_direct_io as u64 * 1024
    }

    /// Returns the maximum GPU memory that cuFile pins, in bytes.
    pub(super) fn pinned_bytes_max(&self) -> u64 {
        u64::from(self.max_pinned) * 1024
    }

    /// Returns the maximum entries of a batch.
    pub(super) fn batch_entries_max(&self) -> u32 {
        self.max_batch
    }

    pub(super) fn allows_compatibility(&self) -> bool {
        self.control & Self::ALLOW_COMPATIBILITY != 0
    }

    pub(super) fn is_direct(&self) -> bool {
        self.version() != (0, 0) || self.features & Self::PEER_TO_PEER != 0
    }
}

type Transfer<Pointer> = unsafe extern "C" fn(Handle, Pointer, usize, i64, i64) -> isize;

pub(super) struct Functions {
    pub(super) driver_open: unsafe extern "C" fn() -> Status,
    pub(super) driver_close: unsafe extern "C" fn() -> Status,
    /// Since CUDA 12.
    pub(super) driver_close_v2: Option<unsafe extern "C" fn() -> Status>,
    /// Sets a parameter of the next opening. Not in every version.
    pub(super) set_parameter_bool: Option<unsafe extern "C" fn(c_int, bool) -> Status>,
    pub(super) driver_properties: unsafe extern "C" fn(*mut Properties) -> Status,
    pub(super) handle_register: unsafe extern "C" fn(*mut Handle, *mut FileDescription) -> Status,
    pub(super) handle_deregister: unsafe extern "C" fn(Handle),
    pub(super) buffer_register: unsafe extern "C" fn(*const c_void, usize, c_int) -> Status,
    pub(super) buffer_deregister: unsafe extern "C" fn(*const c_void) -> Status,
    pub(super) read: Transfer<*mut c_void>,
    pub(super) write: Transfer<*const c_void>,
    /// Not in every version.
    pub(super) batch: Option<batch_functions::Functions>,
    /// Not in every version.
    pub(super) statistics: Option<statistics_functions::Functions>,
}

impl Functions {
    /// # Safety
    /// The library is cuFile: its symbols have the declared types.
    pub(super) unsafe fn of(library: &Library) -> Result<Self, libloading::Error> {
        // SAFETY: the declared types are those of cufile.h, and the caller of `of` passes no library but cuFile.
        unsafe {
            Ok(Self {
                driver_open: *library.get(b"cuFileDriverOpen\0")?,
                driver_close: *library.get(b"cuFileDriverClose\0")?,
                driver_close_v2: library.get(b"cuFileDriverClose_v2\0").ok().map(|symbol| *symbol),
                set_parameter_bool: library.get(b"cuFileSetParameterBool\0").ok().map(|symbol| *symbol),
                driver_properties: *library.get(b"cuFileDriverGetProperties\0")?,
                handle_register: *library.get(b"cuFileHandleRegister\0")?,
                handle_deregister: *library.get(b"cuFileHandleDeregister\0")?,
                buffer_register: *library.get(b"cuFileBufRegister\0")?,
                buffer_deregister: *library.get(b"cuFileBufDeregister\0")?,
                read: *library.get(b"cuFileRead\0")?,
                write: *library.get(b"cuFileWrite\0")?,
                batch: batch_functions::Functions::known_to_work(library),
                statistics: statistics_functions::Functions::of(library).ok(),
            })
        }
    }
}
