//! A file registered with cuFile. Ops carry it, so an op cannot use the registration of another file.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use deepnvme_cuda::{CuFile, FileHandle};

use crate::sync::{Mutex, lock};

/// A file registered with cuFile until the last clone is dropped.
#[derive(Clone, Debug)]
pub struct RegisteredFile(Arc<Registration>);

#[derive(Debug)]
struct Registration {
    // Released before the descriptor is closed.
    handle: FileHandle,
    _file: Arc<OwnedFd>,
    untried: Option<u64>,
    /// The latest reason why a transfer failed.
    refusal: Mutex<Option<String>>,
}

impl RegisteredFile {
    /// Registers a file with cuFile. `untried` is the device number of its file system if cuFile may copy through the
    /// host.
    pub(crate) fn register(cufile: &CuFile, file: &Arc<OwnedFd>, untried: Option<u64>) -> Result<Self, String> {
        let handle = FileHandle::new(cufile, file.as_fd()).map_err(|error| error.to_string())?;
        let refusal = Mutex::new(None);
        Ok(Self(Arc::new(Registration { handle, _file: Arc::clone(file), untried, refusal })))
    }

    /// Records why a transfer failed.
    pub(crate) fn refuse(&self, reason: String) {
        *lock(&self.0.refusal) = Some(reason);
    }

    /// Returns the latest reason why a transfer failed.
    pub(crate) fn refusal(&self) -> Option<String> {
        lock(&self.0.refusal).clone()
    }

    /// Returns the device number of the file's file system if cuFile may copy through the host.
    pub(crate) fn untried(&self) -> Option<u64> {
        self.0.untried
    }

    pub(crate) fn handle(&self) -> &FileHandle {
        &self.0.handle
    }
}
