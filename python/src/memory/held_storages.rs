//! Keep the memory of torch storages in place while a transfer uses it.
//!
//! `storage.resize_()` frees or moves the memory even if others share the storage. So does `share_memory_()`, which
//! `deepnvme._utils.held_storages` refuses meanwhile. torch refuses to resize a storage without the flag of
//! `resize_flag`, which is cleared for the time of a transfer.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard};

use deepnvme_mem::sync::ignore_poison;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use super::{forks, resize_flag};
use crate::imported;
use crate::once::{GilOnce, intern};

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
        let mut storages = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            storages.push(tensor.call_method0(intern!(py, "untyped_storage"))?);
        }
        Ok(Self::of_storages(py, storages)?.0)
    }

    /// Hold storages. Also returns the addresses of the bytes of each.
    pub(super) fn of_storages(py: Python<'_>, storages: Vec<Bound<'_, PyAny>>) -> PyResult<(Self, Vec<Range<usize>>)> {
        let flag_offset = resize_flag::offset(py)?;
        let moving_hook = match moving_hook(py)? {
            Some(hook) if hook.bind(py).len()? > 0 => Some(hook),
            _ => None,
        };
        let mut keys = Vec::with_capacity(storages.len());
        for storage in &storages {
            let key = storage.getattr(intern!(py, "_cdata"))?;
            check_not_moving(py, moving_hook, &key)?;
            keys.push(key.extract()?);
        }
        // No Python code runs while the table is locked: what it drops may need the table.
        let mut held = held();
        keys.iter().for_each(|storage| held.hold(*storage, flag_offset));
        drop(held);
        let mut holds = Self { holds: keys, objects: Vec::with_capacity(storages.len()), ranges: Vec::new() };
        // Read once they are held: their sizes stay.
        let mut places = Vec::with_capacity(storages.len());
        for storage in storages {
            let start: usize = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
            let bytes: usize = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
            places.push(start..start.saturating_add(bytes));
            holds.objects.push(storage.unbind());
        }
        let mut ranges: Vec<_> = places.iter().map(|place| (place.start, place.end)).collect();
        ranges.sort_unstable();
        let mut end = 0;
        for range in &mut ranges {
            end = end.max(range.1);
            range.1 = end;
        }
        holds.ranges = ranges;
        Ok((holds, places))
    }

    /// Returns whether a storage has all of these bytes. One that was resized keeps the shapes of its tensors.
    pub(super) fn contain(&self, address: usize, bytes: usize) -> bool {
        let after = self.ranges.partition_point(|(start, _)| *start <= address);
        let Some(before) = after.checked_sub(1) else { return false };
        self.ranges[before].1.checked_sub(address).is_some_and(|available| available >= bytes)
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
        let flag_offset = resize_flag::offset(py)?;
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
        // SAFETY: the caller holds a reference to the storage.
        let flag = flag_offset.map(|flag_offset| unsafe { resize_flag::of(storage, flag_offset) });
        let is_resizable = flag.is_some_and(|flag| flag.swap(0, Ordering::Relaxed) != 0);
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
        if let (true, Some(flag_offset)) = (entry.is_resizable, resize_flag::known_offset()) {
            // SAFETY: every holder drops its reference to the storage after its hold.
            unsafe { resize_flag::of(storage, flag_offset) }.store(1, Ordering::Relaxed);
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
