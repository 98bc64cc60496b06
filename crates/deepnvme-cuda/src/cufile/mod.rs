//! cuFile, NVIDIA's library for GPUDirect Storage: transfers between files and GPU memory past the host's memory.
//!
//! `functions` and `batch_functions` have what is taken out of the library, `answer` what those answer, `open` how its
//! driver is opened, `file` files that it knows, `buffer` memory that it knows and `span` how that is named, `transfer` what
//! a read or a write says, `batch` many of them at once.
//! The library is opened by [`CuFile::open`] and closed with its last user.

mod answer;
mod batch;
mod batch_functions;
mod buffer;
mod file;
mod functions;
mod open;
mod span;
mod transfer;

use std::sync::Arc;

use once_cell::race::OnceBox;

pub use batch::{Batch, BatchEntry, BatchEvent};
pub use buffer::BufferRegistration;
pub use file::FileHandle;
pub use span::DeviceSpan;
pub use transfer::IoError;

use self::answer::{Answer, check};
use self::functions::{Functions, Properties};
use crate::driver::Driver;
use crate::error::{Absent, Error, Result};
use crate::library::Wanted;

const WANTED: Wanted = Wanted {
    what: "cuFile (GPUDirect Storage)",
    variable: "DEEPNVME_LIBCUFILE",
    names: &["libcufile.so.0", "libcufile.so"],
    is_in_wheels: true,
    remedy: "install the CUDA toolkit's gds package or torch with CUDA, whose packages bring it, and import torch first",
};

/// cuFile, opened: its driver runs for as long as a clone of this lives.
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
    /// Opens cuFile. That reads the configuration which NVIDIA documents (`CUFILE_ENV_PATH_JSON`, `/etc/cufile.json`), and
    /// nothing is written or changed for it here. Its log goes where `CUFILE_LOGFILE_PATH` or that configuration says,
    /// and nowhere where none of them does: its own choice would be the current folder.
    ///
    /// # Errors
    /// Why there is none: no driver, no library, or a library that does not start.
    pub fn open() -> std::result::Result<Self, Absent> {
        let driver = Driver::get()?;
        let functions = functions()?;
        let refused = |error: &Error| Absent { text: format!("cuFile does not start: {error}") };
        if let Some(obstacle) = open::obstacle(WANTED.is_named()) {
            return Err(Absent { text: format!("cuFile is not started: {obstacle}") });
        }
        // SAFETY: the function takes nothing; whatever it answers is looked at.
        let opened = open::without_log(|| unsafe { (functions.driver_open)() });
        let answer = opened.map_err(|error| Absent { text: format!("cuFile does not start: no thread ({error})") })?;
        check(driver, "cuFileDriverOpen", answer).map_err(|error| refused(&error))?;
        let mut session = Session { functions, driver, properties: Properties::default() };
        // SAFETY: the pointer is to a struct of the library's own layout.
        let answer = unsafe { (functions.driver_properties)(&raw mut session.properties) };
        // From here on dropping the session closes the driver.
        check(driver, "cuFileDriverGetProperties", answer).map_err(|error| refused(&error))?;
        Ok(Self { session: Arc::new(session) })
    }

    /// Whether disk and GPU really do without host memory. If not, cuFile copies by way of the host itself, which it
    /// calls compatibility mode.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.session.properties.is_direct()
    }

    /// Why it is in compatibility mode; `None` where it is not.
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

    /// The version of the kernel module nvidia-fs; zeros where it is not loaded.
    #[must_use]
    pub fn nvidia_fs_version(&self) -> (u32, u32) {
        self.session.properties.version()
    }

    /// The largest piece that cuFile hands on at once, in bytes; longer transfers it cuts itself.
    #[must_use]
    pub fn transfer_bytes_max(&self) -> u64 {
        self.session.properties.transfer_bytes_max()
    }

    /// How many bytes of one GPU may be registered, with what cuFile pins for itself.
    #[must_use]
    pub fn pinned_bytes_max(&self) -> u64 {
        self.session.properties.pinned_bytes_max()
    }

    fn check(&self, call: &'static str, answer: Answer) -> Result<()> {
        check(self.session.driver, call, answer)
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

/// The functions, taken at the first call.
fn functions() -> std::result::Result<&'static Functions, Absent> {
    // Without a lock, as the driver.
    static FUNCTIONS: OnceBox<std::result::Result<Functions, Absent>> = OnceBox::new();
    let load = || {
        let library = WANTED.open()?;
        // SAFETY: it has cuFile's name, or the user says that it is one.
        let functions = unsafe { Functions::of(&library) };
        // Closing it would take the functions away.
        std::mem::forget(library);
        functions.map_err(|error| Absent { text: format!("cuFile lacks a function ({error}); install a newer one") })
    };
    FUNCTIONS.get_or_init(|| Box::new(load())).as_ref().map_err(Clone::clone)
}
