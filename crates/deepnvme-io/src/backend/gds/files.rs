//! The files that cuFile knows in this process. A file may serve several engines, and is registered once.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use deepnvme_cuda::{CuFile, FileHandle};

/// By the address of the descriptor that ops name.
static FILES: Mutex<BTreeMap<usize, Weak<FileHandle>>> = Mutex::new(BTreeMap::new());

/// Has cuFile know a file, for as long as the answer lives; that must not be longer than the descriptor.
pub(super) fn register(cufile: &CuFile, file: &Arc<OwnedFd>) -> Result<Arc<FileHandle>, String> {
    if let Some(handle) = handle_of(file) {
        return Ok(handle);
    }
    let handle = Arc::new(FileHandle::new(cufile, file.as_fd()).map_err(|error| error.to_string())?);
    let mut files = files();
    files.retain(|_, handle| handle.strong_count() > 0);
    files.insert(Arc::as_ptr(file).addr(), Arc::downgrade(&handle));
    Ok(handle)
}

/// What cuFile knows a file by.
pub(super) fn handle_of(file: &Arc<OwnedFd>) -> Option<Arc<FileHandle>> {
    files().get(&Arc::as_ptr(file).addr()).and_then(Weak::upgrade)
}

fn files() -> MutexGuard<'static, BTreeMap<usize, Weak<FileHandle>>> {
    FILES.lock().unwrap_or_else(PoisonError::into_inner)
}
