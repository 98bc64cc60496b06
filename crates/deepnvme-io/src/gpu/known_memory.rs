//! Host memory that the CUDA driver is told of as soon as this process uses a GPU.
//!
//! The driver copies memory that it knows at the speed of the bus and asynchronously, and torch calls it pinned. Other
//! memory is copied through the driver's own buffers, several times slower. Registering needs a context, and creating one
//! takes time and GPU memory. So memory is registered when it is made if a context exists, else with the first transfer
//! of a GPU, or with the next such memory.
#![allow(unsafe_code)]

use std::sync::{Arc, Mutex, MutexGuard, TryLockError, Weak};
use std::thread::sleep;
use std::time::Duration;

use deepnvme_cuda::{Device as Gpu, Error, HostRegistration, active_device};
use deepnvme_mem::sync::ignore_poison;
use deepnvme_mem::{CreatorProcess, Device, ParentOnly, RegionMut};

/// All such memory of the process.
static MEMORY: Mutex<Vec<Weak<Entry>>> = Mutex::new(Vec::new());

/// How long to try for the lock of the list. A child may have been forked while another thread held it.
const ATTEMPTS_MAX: u32 = 1000;
const ATTEMPT_PAUSE: Duration = Duration::from_millis(1);

/// Memory, and its registration with the driver.
#[derive(Debug)]
struct Entry {
    address: usize,
    bytes: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    _registration: Option<ParentOnly<HostRegistration>>,
    /// Whether the driver was asked, or the memory is being freed.
    is_closed: bool,
}

/// Keeps the memory, and ends its registration first.
struct Owner {
    entry: Arc<Entry>,
    creator: CreatorProcess,
    _memory: RegionMut,
}

/// Returns the same memory, which the driver learns of while it lives.
#[must_use]
pub fn known_to_driver(memory: RegionMut) -> RegionMut {
    let (address, bytes) = (memory.addr(), memory.len());
    if bytes == 0 || memory.device() != Device::Host {
        return memory;
    }
    let entry = Arc::new(Entry { address, bytes, state: Mutex::default() });
    if let Some(mut list) = list() {
        list.retain(|known| known.strong_count() > 0);
        list.push(Arc::downgrade(&entry));
    }
    if let Some(gpu) = active_device() {
        register_all(&gpu);
    }
    let owner = Owner { entry, creator: CreatorProcess::current(), _memory: memory };
    let start = std::ptr::with_exposed_provenance_mut(address);
    // SAFETY: the owner keeps the memory, which was passed exclusively.
    unsafe { RegionMut::from_raw(start, bytes, Device::Host, Arc::new(owner)) }
}

/// Registers all memory that the driver does not know yet.
pub(super) fn register_all(gpu: &Arc<Gpu>) {
    let entries: Vec<_> = list().map(|list| list.iter().filter_map(Weak::upgrade).collect()).unwrap_or_default();
    for entry in entries {
        entry.register(gpu);
    }
}

/// Locks the list. `None` if it stays locked.
fn list() -> Option<MutexGuard<'static, Vec<Weak<Entry>>>> {
    for _ in 0..ATTEMPTS_MAX {
        match MEMORY.try_lock() {
            Ok(list) => return Some(list),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => sleep(ATTEMPT_PAUSE),
        }
    }
    None
}

impl Entry {
    fn register(&self, gpu: &Arc<Gpu>) {
        let mut state = ignore_poison(self.state.lock());
        if !state.is_closed {
            // SAFETY: the owner of the memory waits for this lock before it frees the memory, and closes the entry.
            let registered = unsafe { HostRegistration::new(gpu, self.address, self.bytes, Box::new(())) };
            let refused = |error: &Error| tracing::debug!(bytes = self.bytes, %error, "memory was not registered");
            let registration = registered.inspect_err(refused).ok().map(ParentOnly::new);
            *state = State { _registration: registration, is_closed: true };
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // In a forked child the lock may be held for ever, and the registration belongs to the parent.
        if self.creator.is_current() {
            *ignore_poison(self.entry.state.lock()) = State { _registration: None, is_closed: true };
        }
    }
}
