//! The driver's functions, loaded once.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use libloading::Library;
use once_cell::race::OnceBox;

use crate::abi::{Copy2d, DevicePointer, Handle};
use crate::error::{Error, ErrorCode, Result, SUCCESS, Unavailable};
use crate::library::{LibrarySearch, function_table, libraries_loaded};

const SEARCH: LibrarySearch = LibrarySearch {
    library: "the CUDA driver",
    variable: "DEEPNVME_LIBCUDA",
    names: &["libcuda.so.1", "libcuda.so"],
    search_wheels: false,
    remedy: "if this machine has an NVIDIA GPU, install its driver; start a container with its GPUs (docker run --gpus all)",
};

function_table! {
    /// The functions. A driver of CUDA 11.0 or later has them all.
    pub(crate) struct Functions {
        init = b"cuInit\0" (c_uint) -> c_int;
        driver_version = b"cuDriverGetVersion\0" (*mut c_int) -> c_int;
        error_name = b"cuGetErrorName\0" (c_int, *mut *const c_char) -> c_int;
        error_string = b"cuGetErrorString\0" (c_int, *mut *const c_char) -> c_int;
        device_count = b"cuDeviceGetCount\0" (*mut c_int) -> c_int;
        device_get = b"cuDeviceGet\0" (*mut c_int, c_int) -> c_int;
        device_name = b"cuDeviceGetName\0" (*mut c_char, c_int, c_int) -> c_int;
        device_total_memory = b"cuDeviceTotalMem_v2\0" (*mut usize, c_int) -> c_int;
        device_pci_bus_id = b"cuDeviceGetPCIBusId\0" (*mut c_char, c_int, c_int) -> c_int;
        device_attribute = b"cuDeviceGetAttribute\0" (*mut c_int, c_int, c_int) -> c_int;
        context_retain = b"cuDevicePrimaryCtxRetain\0" (*mut Handle, c_int) -> c_int;
        context_release = b"cuDevicePrimaryCtxRelease_v2\0" (c_int) -> c_int;
        context_state = b"cuDevicePrimaryCtxGetState\0" (c_int, *mut c_uint, *mut c_int) -> c_int;
        context_push = b"cuCtxPushCurrent_v2\0" (Handle) -> c_int;
        context_pop = b"cuCtxPopCurrent_v2\0" (*mut Handle) -> c_int;
        context_set = b"cuCtxSetCurrent\0" (Handle) -> c_int;
        context_get = b"cuCtxGetCurrent\0" (*mut Handle) -> c_int;
        context_device = b"cuCtxGetDevice\0" (*mut c_int) -> c_int;
        memory_allocate = b"cuMemAlloc_v2\0" (*mut DevicePointer, usize) -> c_int;
        memory_free = b"cuMemFree_v2\0" (DevicePointer) -> c_int;
        host_register = b"cuMemHostRegister_v2\0" (*mut c_void, usize, c_uint) -> c_int;
        host_unregister = b"cuMemHostUnregister\0" (*mut c_void) -> c_int;
        copy_to_device = b"cuMemcpyHtoDAsync_v2\0" (DevicePointer, *const c_void, usize, Handle) -> c_int;
        copy_to_host = b"cuMemcpyDtoHAsync_v2\0" (*mut c_void, DevicePointer, usize, Handle) -> c_int;
        copy_2d = b"cuMemcpy2DAsync_v2\0" (*const Copy2d, Handle) -> c_int;
        stream_create = b"cuStreamCreate\0" (*mut Handle, c_uint) -> c_int;
        stream_destroy = b"cuStreamDestroy_v2\0" (Handle) -> c_int;
        stream_query = b"cuStreamQuery\0" (Handle) -> c_int;
        stream_is_capturing = b"cuStreamIsCapturing\0" (Handle, *mut c_int) -> c_int;
        capture_mode_exchange = b"cuThreadExchangeStreamCaptureMode\0" (*mut c_int) -> c_int;
        event_create = b"cuEventCreate\0" (*mut Handle, c_uint) -> c_int;
        event_destroy = b"cuEventDestroy_v2\0" (Handle) -> c_int;
        event_record = b"cuEventRecord\0" (Handle, Handle) -> c_int;
        event_query = b"cuEventQuery\0" (Handle) -> c_int;
    }
}

/// The driver, once it is loaded. It is loaded without a lock: a lock that another thread held during a fork would
/// block the child forever.
static DRIVER: OnceBox<std::result::Result<Driver, Unavailable>> = OnceBox::new();

/// `libraries_loaded()` at the last search that did not find the driver.
static MISSED_AT: AtomicU64 = AtomicU64::new(u64::MAX);

/// The CUDA driver of this process.
pub struct Driver {
    pub(crate) functions: Functions,
    // The functions belong to this library. It is never closed: unloading a driver with running threads crashes the
    // process.
    _library: std::mem::ManuallyDrop<Library>,
    version: i32,
}

impl Driver {
    /// Returns the driver. The first call loads and initialises it.
    ///
    /// # Errors
    /// The reason if there is no driver; the same for every call.
    pub fn get() -> std::result::Result<&'static Self, Unavailable> {
        DRIVER.get_or_init(|| Box::new(Self::load())).as_ref().map_err(Clone::clone)
    }

    /// Returns the driver if this process has initialised it, directly or through another library. A forked child of
    /// such a process may get it as well; its calls then fail.
    pub(crate) fn initialised() -> Option<&'static Self> {
        type Count = unsafe extern "C" fn(*mut c_int) -> c_int;
        if let Some(known) = DRIVER.get() {
            return known.as_ref().ok();
        }
        // A search for a library that is not loaded takes 40 us.
        let libraries = libraries_loaded();
        if MISSED_AT.load(Ordering::Relaxed) == libraries {
            return None;
        }
        let Some(library) = SEARCH.loaded() else {
            MISSED_AT.store(libraries, Ordering::Relaxed);
            return None;
        };
        // SAFETY: the library is a CUDA driver, whose function has this type.
        let device_count = unsafe { library.get::<Count>(b"cuDeviceGetCount\0") }.ok()?;
        let mut count = 0;
        // SAFETY: the pointer is to a local value. Before `cuInit` the call only fails.
        let is_initialised = unsafe { device_count(&raw mut count) } == SUCCESS;
        is_initialised.then(Self::get)?.ok()
    }

    fn load() -> std::result::Result<Self, Unavailable> {
        let library = SEARCH.open()?;
        // SAFETY: it has the name of a CUDA driver, or the user chose it.
        let functions = unsafe { Functions::of(&library) };
        let functions = functions.map_err(|error| {
            Unavailable::unusable(format!(
                "the CUDA driver lacks a function ({error}); install one of CUDA 11.0 or later"
            ))
        })?;
        let mut driver = Self { functions, _library: std::mem::ManuallyDrop::new(library), version: 0 };
        // SAFETY: `cuInit` takes no pointers and may be called again.
        let initialised = driver.check("cuInit", unsafe { (driver.functions.init)(0) });
        initialised.map_err(|error| Unavailable::unusable(format!("the CUDA driver does not start: {error}")))?;
        let mut version = 0;
        // SAFETY: the pointer is to a local value.
        if unsafe { (driver.functions.driver_version)(&raw mut version) } == SUCCESS {
            driver.version = version;
        }
        Ok(driver)
    }

    /// Returns the supported version of CUDA: 1000 times the major version plus 10 times the minor version; 0 if it is
    /// unknown.
    #[must_use]
    pub fn version(&self) -> i32 {
        self.version
    }

    /// Returns the number of GPUs.
    ///
    /// # Errors
    /// The driver's error.
    pub fn device_count(&self) -> Result<u32> {
        let mut count = 0;
        // SAFETY: the pointer is to a local value.
        self.check("cuDeviceGetCount", unsafe { (self.functions.device_count)(&raw mut count) })?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// Turns any code except success into an error.
    pub(crate) fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if code == SUCCESS { Ok(()) } else { Err(self.error(call, code)) }
    }

    fn error(&self, call: &'static str, code: c_int) -> Error {
        let (name, text) = (self.text(self.functions.error_name, code), self.text(self.functions.error_string, code));
        let text = match (name, text) {
            (Some(name), Some(text)) => format!("{name}, {text}"),
            (Some(text), None) | (None, Some(text)) => text,
            (None, None) => "unknown error".into(),
        };
        Error { call, code: ErrorCode::Driver(code), text }
    }

    fn text(&self, ask: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int, code: c_int) -> Option<String> {
        let mut text = ptr::null();
        // SAFETY: the driver writes null or a pointer to a text that lives as long as the driver.
        let known = unsafe { ask(code, &raw mut text) } == SUCCESS && !text.is_null();
        // SAFETY: a known code has a text that is not null, ends in a null byte, and lives as long as the driver, which
        // is never unloaded.
        known.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Driver(CUDA {}.{})", self.version / 1000, self.version % 1000 / 10)
    }
}
