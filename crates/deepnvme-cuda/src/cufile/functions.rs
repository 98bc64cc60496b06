//! The functions of cuFile, and the structs that they take (`cufile.h`).

use std::ffi::{c_int, c_void};

use libloading::Library;

use super::answer::Answer;
use super::batch_functions;
use crate::abi::Handle;

/// `CUfileDescr_t`: a file descriptor of Linux.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Description {
    kind: c_int,
    descriptor: Descriptor,
    operations: *const c_void,
}

/// A union with a pointer, of which the descriptor is the first bytes.
#[repr(C, align(8))]
#[derive(Debug)]
struct Descriptor(c_int);

impl Description {
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
    // Later versions may have more than is known here.
    _room: [u64; 8],
}

impl Properties {
    /// `CU_FILE_P2P_SUPPORTED`, as a bit of the features: the kernel's own way, without nvidia-fs.
    const PEER_TO_PEER: u32 = 1 << 4;

    pub(super) fn version(&self) -> (u32, u32) {
        (self.major_version, self.minor_version)
    }

    /// The largest piece that it hands to the kernel module at once, in bytes.
    pub(super) fn transfer_bytes_max(&self) -> u64 {
        self.max_direct_io as u64 * 1024
    }

    /// How much of one GPU's memory it would pin, in bytes.
    pub(super) fn pinned_bytes_max(&self) -> u64 {
        u64::from(self.max_pinned) * 1024
    }

    /// Entries of one batch.
    pub(super) fn batch_entries_max(&self) -> u32 {
        self.max_batch
    }

    pub(super) fn is_direct(&self) -> bool {
        self.version() != (0, 0) || self.features & Self::PEER_TO_PEER != 0
    }
}

type Transfer<Memory> = unsafe extern "C" fn(Handle, Memory, usize, i64, i64) -> isize;

pub(super) struct Functions {
    pub(super) driver_open: unsafe extern "C" fn() -> Answer,
    pub(super) driver_close: unsafe extern "C" fn() -> Answer,
    /// Since CUDA 12.
    pub(super) driver_close_v2: Option<unsafe extern "C" fn() -> Answer>,
    pub(super) driver_properties: unsafe extern "C" fn(*mut Properties) -> Answer,
    pub(super) handle_register: unsafe extern "C" fn(*mut Handle, *mut Description) -> Answer,
    pub(super) handle_deregister: unsafe extern "C" fn(Handle),
    pub(super) buffer_register: unsafe extern "C" fn(*const c_void, usize, c_int) -> Answer,
    pub(super) buffer_deregister: unsafe extern "C" fn(*const c_void) -> Answer,
    pub(super) read: Transfer<*mut c_void>,
    pub(super) write: Transfer<*const c_void>,
    /// Not in every version.
    pub(super) batch: Option<batch_functions::Functions>,
}

impl Functions {
    /// # Safety
    /// The library is cuFile: its symbols have the types that are written here.
    pub(super) unsafe fn of(library: &Library) -> Result<Self, libloading::Error> {
        // SAFETY: the types are those of cufile.h for these symbols, which the caller says the library has.
        unsafe {
            Ok(Self {
                driver_open: *library.get(b"cuFileDriverOpen\0")?,
                driver_close: *library.get(b"cuFileDriverClose\0")?,
                driver_close_v2: library.get(b"cuFileDriverClose_v2\0").ok().map(|symbol| *symbol),
                driver_properties: *library.get(b"cuFileDriverGetProperties\0")?,
                handle_register: *library.get(b"cuFileHandleRegister\0")?,
                handle_deregister: *library.get(b"cuFileHandleDeregister\0")?,
                buffer_register: *library.get(b"cuFileBufRegister\0")?,
                buffer_deregister: *library.get(b"cuFileBufDeregister\0")?,
                read: *library.get(b"cuFileRead\0")?,
                write: *library.get(b"cuFileWrite\0")?,
                batch: batch_functions::Functions::of(library),
            })
        }
    }
}
