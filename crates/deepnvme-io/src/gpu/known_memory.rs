//! Host memory that is registered with the CUDA driver as soon as this process uses a GPU.
//!
//! The driver copies memory that it knows at the speed of the bus and asynchronously, and torch calls it pinned. Other
//! memory is copied through the driver's own buffers, several times slower. Registering needs a context, and creating
//! one takes time and GPU memory. So memory is registered when it is made if a context exists. Otherwise it is
//! registered when an engine opens a GPU, together with the next such memory, or by [`register_waiting`].
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError, Weak};
use std::thread::sleep;
use std::time::Duration;

use deepnvme_cuda::{
    Device as Gpu, Error, HostRegistration, RawStream, active_device, current_device, wait_for_stream,
};
use deepnvme_mem::sync::ignore_poison;
use deepnvme_mem::{CreatorProcess, Device, ParentOnly, RegionMut, StreamHandle, exceeds_available};

/// All such memory of the process.
static MEMORY: Mutex<Vec<Weak<Entry>>> = Mutex::new(Vec::new());

/// Whether the driver was not asked about some of it yet, since no GPU was in use.
static IS_WAITING: AtomicBool = AtomicBool::new(false);

/// How often to try to lock the list. A child may have been forked while another thread held it.
const ATTEMPTS_MAX: u32 = 50;
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
    /// Whether the driver was asked once, or the memory is being freed.
    is_closed: bool,
}

/// Keeps the memory, and ends its registration first.
struct Owner {
    entry: Arc<Entry>,
    creator: CreatorProcess,
    _memory: RegionMut,
}

/// Returns the GPU that is current on this thread, as torch sets it. `None` if the process uses no GPU.
#[must_use]
pub fn current_gpu() -> Option<Device> {
    current_device().map(|index| Device::Cuda { index })
}

/// Waits for the work of a stream of the GPU that is current on this thread. Copies between the GPU and memory that the
/// driver knows may be a part of that work. Failures of that work are not reported here.
pub fn wait_for_copies(stream: StreamHandle) {
    // SAFETY: the code that made the handle keeps the stream alive until its last use (`StreamHandle::from_raw`).
    wait_for_stream(unsafe { RawStream::from_handle(stream.as_raw()) });
}

/// Registers memory with the driver, as soon as the process uses a GPU and until the memory is freed. Returns the same
/// memory.
#[must_use]
pub fn register_with_driver(memory: RegionMut) -> RegionMut {
    let (address, bytes) = (memory.addr(), memory.len());
    if bytes == 0 || memory.device() != Device::Host {
        return memory;
    }
    let entry = Arc::new(Entry { address, bytes, state: Mutex::default() });
    if let Some(mut list) = list() {
        list.retain(|known| known.strong_count() > 0);
        list.push(Arc::downgrade(&entry));
    }
    IS_WAITING.store(true, Ordering::Release);
    register_waiting();
    let owner = Owner { entry, creator: CreatorProcess::current(), _memory: memory };
    let start = std::ptr::with_exposed_provenance_mut(address);
    // SAFETY: the owner keeps the memory, which was passed exclusively.
    unsafe { RegionMut::from_raw(start, bytes, Device::Host, Arc::new(owner)) }
}

/// Registers memory that was made before the process used a GPU, if it uses one by now. Otherwise it costs little.
pub fn register_waiting() {
    if IS_WAITING.load(Ordering::Acquire)
        && let Some(gpu) = active_device()
    {
        register_all(&gpu);
    }
}

/// Registers all memory that the driver was not asked about yet, unless it exceeds the RAM that is available.
pub(super) fn register_all(gpu: &Arc<Gpu>) {
    IS_WAITING.store(false, Ordering::Release);
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
        // If the lock is held, another thread registers the memory or frees it.
        let Ok(mut state) = self.state.try_lock() else { return };
        if !state.is_closed && !exceeds_available(self.bytes) {
            // SAFETY: in the process that created the memory, its owner waits for this lock and closes the entry before
            // it frees the memory. In a forked child, the owner tries the lock once, since a thread of the parent may
            // have held it.
            let registered = unsafe { HostRegistration::new(gpu, self.address, self.bytes, Box::new(())) };
            let refused = |error: &Error| tracing::debug!(bytes = self.bytes, %error, "memory was not registered");
            let registration = registered.inspect_err(refused).ok().map(ParentOnly::new);
            *state = State { _registration: registration, is_closed: true };
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let closed = State { _registration: None, is_closed: true };
        if self.creator.is_current() {
            *ignore_poison(self.entry.state.lock()) = closed;
        } else if let Ok(mut state) = self.entry.state.try_lock() {
            // In a forked child the lock may be held for ever. The registration belongs to the parent.
            *state = closed;
        }
    }
}
