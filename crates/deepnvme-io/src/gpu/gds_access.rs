//! A backend with GPUDirect Storage, without an engine: for programs that drive backends directly and for contract tests.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::registry::GpuRegistry;
use crate::backend::gds::{Gds, GdsBackend};
use crate::backend::{Backend, BackendSetup};
use crate::op::RegisteredFile;

/// GPUDirect Storage for some backends.
#[derive(Debug)]
pub struct GdsAccess(Arc<Gds>);

impl GdsAccess {
    /// Creates an access without opening cuFile.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(Gds::new(Arc::<GpuRegistry>::default())))
    }

    /// Returns a backend that moves ops with GPU memory through cuFile, and all others through `main`. GPU ops need the
    /// registration of their file from [`register`](Self::register), or end with `EBADF`.
    #[must_use]
    pub fn combine(&self, main: Box<dyn Backend>, setup: &BackendSetup) -> Box<dyn Backend> {
        Box::new(GdsBackend::new(main, setup, &self.0))
    }

    /// Registers a file with cuFile.
    ///
    /// # Errors
    /// The reason if it cannot: cuFile is missing, it would copy through the host, or it refuses the file.
    pub fn register(&self, file: &Arc<OwnedFd>) -> Result<RegisteredFile, String> {
        self.0.register(file)
    }
}

impl Default for GdsAccess {
    fn default() -> Self {
        Self::new()
    }
}
