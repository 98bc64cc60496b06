//! A file registered with cuFile. Ops carry it, so an op cannot use the registration of another file.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use deepnvme_cuda::{CuFile, FileHandle};

/// A file registered with cuFile until the last clone is dropped.
#[derive(Clone, Debug)]
pub struct RegisteredFile(Arc<Registration>);

#[derive(Debug)]
struct Registration {
    // Released before the descriptor is closed.
    handle: FileHandle,
    _file: Arc<OwnedFd>,
    untried: Option<u64>,
}

impl RegisteredFile {
    /// Registers a file with cuFile. `untried` is the device number of its file system if cuFile may copy through the
    /// host.
    pub(crate) fn register(cufile: &CuFile, file: &Arc<OwnedFd>, untried: Option<u64>) -> Result<Self, String> {
        let handle = FileHandle::new(cufile, file.as_fd()).map_err(|error| error.to_string())?;
        Ok(Self(Arc::new(Registration { handle, _file: Arc::clone(file), untried })))
    }

    /// Returns the device number of the file's file system if cuFile may copy through the host.
    pub(crate) fn untried(&self) -> Option<u64> {
        self.0.untried
    }

    pub(crate) fn handle(&self) -> &FileHandle {
        &self.0.handle
    }
}
