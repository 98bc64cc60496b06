//! cuFile beside a backend without an engine around it, for programs that drive backends themselves, and for tests of the contract.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::beside::GdsBackend;
use super::cufile::Gds;
use crate::backend::contract::{Backend, BackendSetup};
use crate::backend::device::OpenedGpus;
pub use crate::op::KnownFile;

/// cuFile for some backends.
#[derive(Debug)]
pub struct CuFileAccess(Arc<Gds>);

impl CuFileAccess {
    /// Opens nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(Gds::new(&Arc::<OpenedGpus>::default())))
    }

    /// A backend that moves ops with memory of a GPU by way of cuFile, and all others as `main` does. They carry what
    /// [`register`](Self::register) gave for their files, or end with `EBADF`.
    #[must_use]
    pub fn beside(&self, main: Box<dyn Backend>, setup: &BackendSetup) -> Box<dyn Backend> {
        Box::new(GdsBackend::new(main, setup, &self.0))
    }

    /// Has cuFile know a file.
    ///
    /// # Errors
    /// Why it cannot: there is no cuFile, it would go by way of the host, or it refuses the file.
    pub fn register(&self, file: &Arc<OwnedFd>) -> Result<KnownFile, String> {
        self.0.register(file)
    }
}

impl Default for CuFileAccess {
    fn default() -> Self {
        Self::new()
    }
}
