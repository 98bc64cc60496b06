//! cuFile, NVIDIA's library for GPUDirect Storage: transfers between files and GPU memory without host memory.
//!
//! `functions` and `batch_functions` are the library's functions and structs, `error` its status codes, `open` opens its
//! driver, `file` and `buffer` register files and memory, `batch` submits many transfers at once. [`CuFile::open`] opens the
//! library, and its last user closes it.

mod batch;
mod batch_functions;
mod buffer;
mod error;
mod file;
mod functions;
mod open;

use std::sync::Arc;

use once_cell::race::OnceBox;

pub use batch::{Batch, BatchEntry, BatchEvent};
pub use buffer::{BufferRegistration, DeviceSpan};
pub use error::{IoError, IoResult};
pub use file::FileHandle;

use self::error::{Status, check};
use self::functions::{Functions, Properties};
use crate::driver::Driver;
use crate::error::{Error, Result, Unavailable};
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
    /// Opens cuFile. It reads NVIDIA's documented configuration (`CUFILE_ENV_PATH_JSON`, `/etc/cufile.json`); nothing
    /// is written or changed. Its log goes where `CUFILE_LOGFILE_PATH` or the configuration says, and is discarded
    /// otherwise, instead of being written to the current folder.
    ///
    /// # Errors
    /// The reason if it is unavailable: no driver, no library, or a library that fails to start.
    pub fn open() -> std::result::Result<Self, Unavailable> {
        let driver = Driver::get()?;
        let functions = functions()?;
        let refused = |error: &Error| Unavailable { text: format!("cuFile does not start: {error}") };
        if let Some(obstacle) = open::why_not(SEARCH.is_overridden()) {
            return Err(Unavailable { text: format!("cuFile is not started: {obstacle}") });
        }
        // SAFETY: the function takes no arguments, and its status is checked.
        let opened = open::without_log(|| unsafe { (functions.driver_open)() });
        let status =
            opened.map_err(|error| Unavailable { text: format!("cuFile does not start: no thread ({error})") })?;
        check(driver, "cuFileDriverOpen", status).map_err(|error| refused(&error))?;
        let mut session = Session { functions, driver, properties: Properties::default() };
        // SAFETY: the pointer is to a struct with the library's layout.
        let status = unsafe { (functions.driver_properties)(&raw mut session.properties) };
        // From here on, dropping the session closes the driver.
        check(driver, "cuFileDriverGetProperties", status).map_err(|error| refused(&error))?;
        Ok(Self { session: Arc::new(session) })
    }

    /// Whether transfers bypass host memory. Otherwise cuFile copies through the host, in compatibility mode.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.session.properties.is_direct()
    }

    /// Returns why cuFile is in compatibility mode; `None` if it is not.
    #[must_use]
    pub fn compatibility_reason(&self) -> Option<&'static str> {
        (!self.is_direct()).then_some(
            "cuFile is in compatibility mode: the kernel has neither the module nvidia-fs nor peer-to-peer transfers to NVMe",
        )
    }

    /// Whether the library has the batch API.
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

impl Drop for Session {
    fn drop(&mut self) {
        let close = self.functions.driver_close_v2.unwrap_or(self.functions.driver_close);
        // SAFETY: it was opened once for this session, and files and buffers hold the session.
        let _ = unsafe { close() };
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (major, minor) = self.properties.version();
        write!(f, "cuFile, nvidia-fs {major}.{minor}, direct: {}", self.properties.is_direct())
    }
}

/// Returns the functions, loaded at the first call.
fn functions() -> std::result::Result<&'static Functions, Unavailable> {
    // Without a lock, as for the driver.
    static FUNCTIONS: OnceBox<std::result::Result<Functions, Unavailable>> = OnceBox::new();
    let load = || {
        let library = SEARCH.open()?;
        // SAFETY: it has cuFile's name, or the user chose it.
        let functions = unsafe { Functions::of(&library) };
        // Closing the library would invalidate the functions.
        std::mem::forget(library);
        functions
            .map_err(|error| Unavailable { text: format!("cuFile lacks a function ({error}); install a newer one") })
    };
    FUNCTIONS.get_or_init(|| Box::new(load())).as_ref().map_err(Clone::clone)
}
