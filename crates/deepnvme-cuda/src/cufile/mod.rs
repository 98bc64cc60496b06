//! cuFile, NVIDIA's library for GPUDirect Storage: transfers between files and GPU memory without host memory.
//!
//! `functions`, `batch_functions` and `statistics_functions` are the library's functions and structs, `error` the
//! texts of its error codes, `open` opens its driver, `file` and `buffer` register files and memory, `batch` submits
//! many transfers at once, `statistics` tells direct transfers from copied ones. [`CuFile::open`] opens cuFile's
//! driver, and its last user closes it.

mod batch;
mod batch_functions;
mod buffer;
mod error;
mod file;
mod functions;
mod open;
mod statistics;
mod statistics_functions;

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use once_cell::race::OnceBox;

pub use batch::{Batch, BatchEntry, BatchEvent};
pub use buffer::{BufferRegistration, DeviceSpan};
pub use error::{IoError, IoResult};
pub use file::FileHandle;
pub use statistics_functions::TransferCounts;

use self::error::{Status, check};
use self::functions::{Functions, Properties};
use crate::capture::RelaxedCapture;
use crate::driver::Driver;
use crate::error::{Error, ErrorCode, Result, Unavailable};
use crate::library::LibrarySearch;

const SEARCH: LibrarySearch = LibrarySearch {
    library: "cuFile (GPUDirect Storage)",
    variable: "DEEPNVME_LIBCUFILE",
    names: &["libcufile.so.0", "libcufile.so"],
    search_wheels: true,
    remedy: "install the CUDA toolkit's gds package or torch with CUDA, whose packages bring it, and import torch first",
};

/// An open cuFile. Its driver runs while a clone of this lives.
#[derive(Clone, Debug)]
pub struct CuFile {
    session: Arc<Session>,
}

struct Session {
    functions: &'static Functions,
    driver: &'static Driver,
    properties: Properties,
}

impl CuFile {
    /// Opens cuFile for transfers that bypass host memory. It reads NVIDIA's documented configuration
    /// (`CUFILE_ENV_PATH_JSON`, `/etc/cufile.json`); nothing of it is changed. Its log goes where `CUFILE_LOGFILE_PATH`
    /// or the configuration says. Otherwise the log is discarded, unless `CUFILE_ENV_PATH_JSON` is a relative path:
    /// then cuFile writes it to the current folder.
    ///
    /// # Errors
    /// The reason if it is unavailable: no driver, no library, a library that lacks a function or fails to start, or a
    /// machine where it would copy every file through the host (compatibility mode). The last is remembered, since
    /// opening takes 0.2 s: it is the kernel's answer, and asked for once. A library that is not found is searched for
    /// again by the next call.
    pub fn open() -> std::result::Result<Self, Unavailable> {
        let driver = Driver::get()?;
        let functions = functions()?;
        if IS_COMPATIBILITY_MODE.load(Ordering::Relaxed) {
            return Err(compatibility_mode());
        }
        let refused = |error: &Error| Unavailable::unusable(format!("cuFile does not start: {error}"));
        if let Some(obstacle) = open::why_not(SEARCH.is_overridden()) {
            return Err(Unavailable::unusable(format!("cuFile is not started: {obstacle}")));
        }
        let opened = open::without_log(|| {
            let opened = Session::open(functions, driver, true);
            // With copies forbidden, cuFile reports only that its driver did not start. Open again with copies allowed,
            // to learn whether compatibility mode is the cause.
            if !opened.as_ref().is_err_and(is_not_initialised) || functions.set_parameter_bool.is_none() {
                return opened;
            }
            match Session::open(functions, driver, false) {
                Ok(session) if !session.properties.is_direct() => Ok(session),
                _ => opened,
            }
        });
        let session =
            opened.map_err(|error| Unavailable::unusable(format!("cuFile does not start: no thread ({error})")))?;
        let session = session.map_err(|error| refused(&error))?;
        if !session.properties.is_direct() {
            IS_COMPATIBILITY_MODE.store(true, Ordering::Relaxed);
            return Err(compatibility_mode());
        }
        Ok(Self { session: Arc::new(session) })
    }

    /// Returns whether cuFile refuses files that it could only copy through the host. It accepts them if the
    /// library is old, if another user of the process opened its driver before, or if the user's settings force
    /// compatibility mode (`CUFILE_FORCE_COMPAT_MODE`; version 1.17 ignores the ban then). Only its statistics show
    /// such copies.
    #[must_use]
    pub fn refuses_copies(&self) -> bool {
        !self.session.properties.allows_compatibility()
    }

    /// Returns whether the library has the batch API.
    #[must_use]
    pub fn has_batches(&self) -> bool {
        self.functions().batch.is_some()
    }

    /// Returns the version of the kernel module nvidia-fs; zeros if it is not loaded.
    #[must_use]
    pub fn nvidia_fs_version(&self) -> (u32, u32) {
        self.session.properties.version()
    }

    /// Returns the largest transfer that cuFile passes on, in bytes. Longer transfers are split.
    #[must_use]
    pub fn transfer_bytes_max(&self) -> u64 {
        self.session.properties.transfer_bytes_max()
    }

    /// Returns the maximum registered bytes of one GPU, including cuFile's own.
    #[must_use]
    pub fn pinned_bytes_max(&self) -> u64 {
        self.session.properties.pinned_bytes_max()
    }

    fn check(&self, call: &'static str, status: Status) -> Result<()> {
        check(self.session.driver, call, status)
    }

    fn functions(&self) -> &'static Functions {
        self.session.functions
    }
}

impl Session {
    /// Opens the driver. `forbids_copies` has an effect if the library can forbid compatibility mode and its driver is
    /// closed: an attempt to open uses up the setting, so that other users of the library get their own.
    fn open(functions: &'static Functions, driver: &'static Driver, forbids_copies: bool) -> Result<Self> {
        let _capture = RelaxedCapture::enter(driver);
        if let Some(set) = functions.set_parameter_bool.filter(|_| forbids_copies) {
            // SAFETY: the parameter is boolean. A driver that is open already refuses it, which its properties tell.
            let _ = unsafe { set(ALLOW_COMPATIBILITY_MODE, false) };
        }
        // SAFETY: the function takes no arguments, and its status is checked.
        check(driver, "cuFileDriverOpen", unsafe { (functions.driver_open)() })?;
        // From here on, dropping the session closes the driver.
        let mut session = Self { functions, driver, properties: Properties::default() };
        // SAFETY: the pointer is to a struct with the library's layout.
        let status = unsafe { (functions.driver_properties)(&raw mut session.properties) };
        check(driver, "cuFileDriverGetProperties", status)?;
        Ok(session)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let close = self.functions.driver_close_v2.unwrap_or(self.functions.driver_close);
        let _capture = RelaxedCapture::enter(self.driver);
        // SAFETY: it was opened once for this session, and files, buffers and batches hold the session.
        let _ = unsafe { close() };
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (major, minor) = self.properties.version();
        write!(f, "cuFile, nvidia-fs {major}.{minor}")
    }
}

/// `CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE`.
const ALLOW_COMPATIBILITY_MODE: c_int = 1;
/// `CU_FILE_DRIVER_NOT_INITIALIZED`.
const NOT_INITIALISED: c_int = 5001;

fn is_not_initialised(error: &Error) -> bool {
    error.code() == ErrorCode::CuFile(NOT_INITIALISED)
}

/// Whether cuFile has answered that it would copy every file through the host.
static IS_COMPATIBILITY_MODE: AtomicBool = AtomicBool::new(false);

fn compatibility_mode() -> Unavailable {
    let text = "cuFile is in compatibility mode: the kernel has neither the module nvidia-fs nor peer-to-peer transfers to NVMe";
    Unavailable::unusable(text.to_owned())
}

/// Returns the functions, loaded once.
fn functions() -> std::result::Result<&'static Functions, Unavailable> {
    // Without a lock, as for the driver. Failures are not kept: the process may load the library later.
    static FUNCTIONS: OnceBox<Functions> = OnceBox::new();
    FUNCTIONS.get_or_try_init(|| {
        let library = SEARCH.open()?;
        // SAFETY: `Functions` declares the signatures of cufile.h, and a library of this name, or of the user's choice,
        // exports those.
        let functions = unsafe { Functions::of(&library) };
        // Closing the library would invalidate the functions.
        std::mem::forget(library);
        functions
            .map(Box::new)
            .map_err(|error| Unavailable::unusable(format!("cuFile lacks a function ({error}); install a newer one")))
    })
}
