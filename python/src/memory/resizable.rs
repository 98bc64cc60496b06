//! Keep the memory of torch storages in place while a transfer uses it.
//!
//! `storage.resize_()` frees or moves the memory even if others share the storage. So does `share_memory_()`, which
//! `deepnvme._utils.held_storages` refuses meanwhile. torch sets a flag on storages that it refuses to resize;
//! `Tensor.numpy()` sets it for good. Here it is set for the time of a transfer. torch has no function to clear it, so
//! the flag's offset is searched once, in storages of our own. The result is used only if torch's own answer follows
//! it.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard};

use deepnvme_mem::sync::ignore_poison;
use pyo3::exceptions::{PyRuntimeError, PyRuntimeWarning};
use pyo3::prelude::*;

use super::forks;
use crate::imported;
use crate::once::{GilOnce, intern};

/// Bytes of a storage to search. Every release since 2.4 keeps the flag within them, and more fields behind it.
const SEARCHED_BYTES: usize = 80;

/// An object that keeps memory alive and, if it is a storage, at a fixed size. Any thread may drop it.
pub(crate) struct KeepAlive {
    hold: Option<StorageHold>,
    object: ManuallyDrop<Py<PyAny>>,
}

impl Drop for KeepAlive {
    fn drop(&mut self) {
        // Dropped first: it needs the storage.
        drop(self.hold.take());
        // SAFETY: the object is not used again.
        forks::release(unsafe { ManuallyDrop::take(&mut self.object) });
    }
}

/// A storage that torch does not resize until this is dropped, on any thread.
struct StorageHold {
    storage: usize,
}

/// The storages of many tensors, held together. Any thread may drop it.
pub(crate) struct StorageHolds {
    holds: Vec<usize>,
    objects: Vec<Py<PyAny>>,
    /// Start and end of each storage, sorted by start. Each end is the maximum of the ends so far.
    ranges: Vec<(usize, usize)>,
}

/// Held storages by address, with hold counts. Every holder keeps its storage alive, so that no other storage reuses
/// the address.
struct HeldStorages {
    pid: u32,
    by_storage: Mutex<HoldCounts>,
}

#[derive(Default)]
struct HoldCounts(HashMap<usize, HoldCount, BuildHasherDefault<AddressHasher>>);

/// Spreads addresses. A step of an optimizer holds and releases tens of thousands of storages.
#[derive(Default)]
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_usize(usize::from(*byte)));
    }

    fn write_usize(&mut self, address: usize) {
        // The upper half decides, so it is folded into the lower one.
        let product = (self.0 ^ address as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = product ^ product >> 32;
    }
}

/// Hold count of a storage, and whether torch resizes it otherwise.
struct HoldCount {
    count: u64,
    is_resizable: bool,
}

impl KeepAlive {
    /// Keeps an object whose memory cannot be taken from its users.
    pub(crate) fn object(object: Py<PyAny>) -> Self {
        Self { hold: None, object: ManuallyDrop::new(object) }
    }

    /// Keeps a torch storage, and its size.
    pub(crate) fn storage(storage: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(Self { hold: Some(StorageHold::new(storage)?), object: ManuallyDrop::new(storage.clone().unbind()) })
    }
}

impl StorageHolds {
    /// Hold the storages of torch tensors, as [`KeepAlive::storage`] does, for a fraction of the time.
    pub(crate) fn new(py: Python<'_>, tensors: &[Bound<'_, PyAny>]) -> PyResult<Self> {
        let flag_offset = flag_offset(py)?;
        let moving_hook = match moving_hook(py)? {
            Some(hook) if hook.bind(py).len()? > 0 => Some(hook),
            _ => None,
        };
        let (mut keys, mut objects) = (Vec::with_capacity(tensors.len()), Vec::with_capacity(tensors.len()));
        for tensor in tensors {
            let storage = tensor.call_method0(intern!(py, "untyped_storage"))?;
            let key = storage.getattr(intern!(py, "_cdata"))?;
            check_not_moving(py, moving_hook, &key)?;
            keys.push(key.extract()?);
            objects.push(storage);
        }
        // No Python code runs while the table is locked: what it drops may need the table.
        let mut held = held();
        keys.iter().for_each(|storage| held.hold(*storage, flag_offset));
        drop(held);
        let mut holds = Self { holds: keys, objects: Vec::with_capacity(objects.len()), ranges: Vec::new() };
        // Read once they are held: their sizes stay.
        let mut ranges = Vec::with_capacity(objects.len());
        for storage in objects {
            let start: usize = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
            let bytes: usize = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
            ranges.push((start, start.saturating_add(bytes)));
            holds.objects.push(storage.unbind());
        }
        ranges.sort_unstable();
        let mut end = 0;
        for range in &mut ranges {
            end = end.max(range.1);
            range.1 = end;
        }
        holds.ranges = ranges;
        Ok(holds)
    }

    /// Returns whether a storage has all of these bytes. One that was resized keeps the shapes of its tensors.
    pub(super) fn contain(&self, address: usize, bytes: usize) -> bool {
        let after = self.ranges.partition_point(|(start, _)| *start <= address);
        let Some(before) = after.checked_sub(1) else { return false };
        self.ranges[before].1.checked_sub(address).is_some_and(|room| room >= bytes)
    }
}

impl Drop for StorageHolds {
    fn drop(&mut self) {
        {
            let mut held = held();
            self.holds.iter().for_each(|storage| held.release(*storage));
        }
        self.objects.drain(..).for_each(forks::release);
    }
}

impl StorageHold {
    fn new(storage: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = storage.py();
        let flag_offset = flag_offset(py)?;
        let key = storage.getattr(intern!(py, "_cdata"))?;
        check_not_moving(py, moving_hook(py)?, &key)?;
        let storage: usize = key.extract()?;
        held().hold(storage, flag_offset);
        Ok(Self { storage })
    }
}

impl Drop for StorageHold {
    fn drop(&mut self) {
        held().release(self.storage);
    }
}

/// Refuse a storage that another thread is moving to shared memory.
fn check_not_moving(py: Python<'_>, moving_hook: Option<&Py<PyAny>>, key: &Bound<'_, PyAny>) -> PyResult<()> {
    let Some(moving_hook) = moving_hook else { return Ok(()) };
    if moving_hook.call_method1(py, intern!(py, "is_moving"), (key,))?.extract(py)? {
        return Err(PyRuntimeError::new_err(
            "this tensor is being moved to shared memory by another thread; wait for that first",
        ));
    }
    Ok(())
}

impl HoldCounts {
    /// Count a hold. The first one makes the storage fixed.
    fn hold(&mut self, storage: usize, flag_offset: Option<usize>) {
        if let Some(entry) = self.0.get_mut(&storage) {
            entry.count += 1;
            return;
        }
        let is_resizable =
            flag_offset.is_some_and(|flag_offset| resizable_flag(storage, flag_offset).swap(0, Ordering::Relaxed) != 0);
        self.0.insert(storage, HoldCount { count: 1, is_resizable });
    }

    /// End a hold. The storage is alive.
    fn release(&mut self, storage: usize) {
        // In a forked child nothing is held: the parent's transfers do not end there.
        let Some(entry) = self.0.get_mut(&storage) else { return };
        entry.count -= 1;
        if entry.count > 0 {
            return;
        }
        if let (true, Some(flag_offset)) = (entry.is_resizable, FLAG_OFFSET.get().copied().flatten()) {
            resizable_flag(storage, flag_offset).store(1, Ordering::Relaxed);
        }
        self.0.remove(&storage);
    }
}

/// Return whether transfers use the torch storage at this address.
#[pyfunction]
pub(crate) fn _is_held(storage: usize) -> bool {
    held().0.contains_key(&storage)
}

/// Returns the hook that keeps torch from moving held storages, installed with the first hold; `None` without torch.
fn moving_hook(py: Python<'_>) -> PyResult<Option<&'static Py<PyAny>>> {
    static MOVING_HOOK: GilOnce<Py<PyAny>> = GilOnce::new();
    if let Some(made) = MOVING_HOOK.get(py) {
        return Ok(Some(made));
    }
    if imported::module(py, "torch")?.is_none() {
        return Ok(None);
    }
    let install = || PyResult::Ok(py.import("deepnvme._utils.held_storages")?.call_method0("install")?.unbind());
    MOVING_HOOK.get_or_try_init(py, install).map(Some)
}

/// Offset of the flag in a storage; `None` if it was not found.
static FLAG_OFFSET: std::sync::OnceLock<Option<usize>> = std::sync::OnceLock::new();

fn flag_offset(py: Python<'_>) -> PyResult<Option<usize>> {
    if let Some(flag_offset) = FLAG_OFFSET.get() {
        return Ok(*flag_offset);
    }
    let flag_offset = find_flag_offset(py)?;
    if flag_offset.is_none() {
        let message =
            c"this release of torch does not show how to keep a storage from being resized: do not resize one \
                        while deepnvme reads into it or writes it";
        PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), message, 1)?;
    }
    Ok(*FLAG_OFFSET.get_or_init(|| flag_offset))
}

/// Compares storages that torch resizes with one that it does not.
fn find_flag_offset(py: Python<'_>) -> PyResult<Option<usize>> {
    let Some(torch) = imported::module(py, "torch")? else { return Ok(None) };
    let is_resizable =
        |storage: &Bound<'_, PyAny>| storage.call_method0(intern!(py, "resizable")).and_then(|answer| answer.extract());
    let address = |storage: &Bound<'_, PyAny>| storage.getattr(intern!(py, "_cdata")).and_then(|cdata| cdata.extract());
    let class = torch.getattr(intern!(py, "UntypedStorage"))?;
    let free = [class.call1((16,))?, class.call1((4096,))?];
    let bytes = pyo3::types::PyByteArray::new(py, &[0; 16]);
    let arguments = pyo3::types::PyDict::new(py);
    arguments.set_item("dtype", torch.getattr(intern!(py, "uint8"))?)?;
    let fixed = torch.call_method(intern!(py, "frombuffer"), (bytes,), Some(&arguments))?;
    let fixed = fixed.call_method0(intern!(py, "untyped_storage"))?;
    if !is_resizable(&free[0])? || !is_resizable(&free[1])? || is_resizable(&fixed)? {
        // A wrapper temporarily replaces torch's ordinary storages. Retry later.
        return Err(PyRuntimeError::new_err(
            "torch makes no ordinary storages here (inside FakeTensorMode, for example)",
        ));
    }
    let addresses: [usize; 2] = [address(&free[0])?, address(&free[1])?];
    let fixed: usize = address(&fixed)?;
    for flag_offset in 0..SEARCHED_BYTES {
        let flags = addresses.map(|storage| resizable_flag(storage, flag_offset));
        if flags.iter().any(|flag| flag.load(Ordering::Relaxed) != 1)
            || resizable_flag(fixed, flag_offset).load(Ordering::Relaxed) != 0
        {
            continue;
        }
        flags[0].store(0, Ordering::Relaxed);
        let follows = is_resizable(&free[0]);
        flags[0].store(1, Ordering::Relaxed);
        if !follows? && is_resizable(&free[0])? {
            return Ok(Some(flag_offset));
        }
    }
    Ok(None)
}

/// Returns the flag of a live storage. It is atomic because other threads may read it without the GIL.
fn resizable_flag(storage: usize, flag_offset: usize) -> &'static AtomicU8 {
    assert!(flag_offset < SEARCHED_BYTES, "the flag lies within what was searched");
    let byte = std::ptr::with_exposed_provenance_mut::<u8>(storage + flag_offset);
    // SAFETY: `_cdata` is the address of torch's own object, which is larger than the searched bytes. The caller keeps
    // the storage alive for as long as the answer is used.
    unsafe { AtomicU8::from_ptr(byte) }
}

/// Returns the held storages of this process. Engines release memory on threads without the GIL, so a fork may find the
/// parent's table locked. The child creates a new table and leaks the old one.
fn held() -> MutexGuard<'static, HoldCounts> {
    static HELD: AtomicPtr<HeldStorages> = AtomicPtr::new(std::ptr::null_mut());
    let pid = deepnvme_mem::process_id();
    loop {
        let current = HELD.load(Ordering::Acquire);
        // SAFETY: tables stored here are never freed.
        if let Some(held) = unsafe { current.as_ref() }.filter(|held| held.pid == pid) {
            return ignore_poison(held.by_storage.lock());
        }
        let made = Box::into_raw(Box::new(HeldStorages { pid, by_storage: Mutex::default() }));
        if HELD.compare_exchange(current, made, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // SAFETY: no other thread has seen it.
            drop(unsafe { Box::from_raw(made) });
        }
    }
}
