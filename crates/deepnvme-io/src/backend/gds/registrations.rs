//! GPU memory registered with cuFile: a bounded table, in which new registrations evict the least recently used ones.
//!
//! Registered memory is mapped into the window through which devices reach the GPU, and that is small on many GPUs.
//! cuFile has one table per process and rejects overlapping ranges, so all engines share this one.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use deepnvme_cuda::{BufferRegistration, CuFile, Device, DeviceSpan};
use deepnvme_mem::sync::ignore_poison;
use deepnvme_mem::{Device as Place, Region};
use smallvec::SmallVec;

use super::recency::Recency;
use crate::sync::{Mutex, lock};

/// Maximum bytes per GPU that a process registers with cuFile. Small compared with the window of a data-centre GPU.
/// cuFile's own limit or a smaller window takes precedence.
pub const REGISTERED_BYTES_MAX: u64 = 8 << 30;

/// The table of this process, while anything uses it.
static OF_PROCESS: std::sync::Mutex<Weak<Registrations>> = std::sync::Mutex::new(Weak::new());

/// Registrations by GPU, since cuFile's limit is per GPU.
///
/// A registration ends only while no transfer touches its memory, and under the table's lock, so that no transfer can
/// start meanwhile.
#[derive(Debug, Default)]
pub(crate) struct Registrations {
    by_gpu: Mutex<HashMap<u32, Recency<RegisteredRange>>>,
    /// Held while registering, so that two threads that need room do not evict each other's memory.
    registering: Mutex<()>,
}

/// One registration.
#[derive(Debug)]
struct RegisteredRange {
    _registration: BufferRegistration,
    /// Identifies its [`GpuRegistration`]: a later one of the same memory differs.
    token: Arc<()>,
    /// Transfers in progress on its memory.
    transfers: u32,
    /// Whether its [`GpuRegistration`] is dropped, so that it ends with the last transfer.
    is_dropped: bool,
}

/// Keeps the registrations of a transfer until this is dropped.
#[derive(Debug)]
pub(crate) struct RegistrationUse {
    registrations: Arc<Registrations>,
    gpu: u32,
    starts: SmallVec<[usize; 1]>,
}

/// GPU memory registered with cuFile, or the reason why it is not. The registration lasts until this is dropped or a
/// later registration evicts it. Transfers are correct either way.
#[derive(Debug)]
pub struct GpuRegistration {
    registrations: Arc<Registrations>,
    gpu: u32,
    start: usize,
    /// Weak, since the table decides how long the registration lasts.
    token: std::result::Result<Weak<()>, String>,
    // Dropped last: the memory outlives its registration.
    _memory: Region,
}

/// Memory as a transfer addresses it.
pub(crate) struct Acquired {
    pub(crate) span: DeviceSpan,
    /// Whether all of it is registered.
    pub(crate) is_registered: bool,
    pub(crate) registration_use: RegistrationUse,
}

/// The result of registering memory.
pub(crate) struct Registered {
    pub(crate) registration: GpuRegistration,
    pub(crate) evicted: u64,
}

impl Registrations {
    /// Returns the table of the process.
    pub(crate) fn of_process() -> Arc<Self> {
        let mut known = ignore_poison(OF_PROCESS.lock());
        known.upgrade().unwrap_or_else(|| {
            let registrations = Arc::<Self>::default();
            *known = Arc::downgrade(&registrations);
            registrations
        })
    }

    /// Returns how cuFile addresses memory, and the guard that keeps it registered. Memory that is not entirely
    /// registered has its own address.
    pub(crate) fn acquire(self: &Arc<Self>, gpu: u32, start: usize, bytes: usize) -> Acquired {
        let mut registration_use = RegistrationUse { registrations: Arc::clone(self), gpu, starts: SmallVec::new() };
        let mut by_gpu = lock(&self.by_gpu);
        let unregistered = DeviceSpan::unregistered(start, bytes);
        let Some(ranges) = by_gpu.get_mut(&gpu) else {
            return Acquired { span: unregistered, is_registered: false, registration_use };
        };
        if let Some((base, known)) = ranges.holding(start, bytes) {
            known.transfers += 1;
            registration_use.starts.push(base);
            let span = DeviceSpan { base, offset_in_base: start - base, bytes };
            return Acquired { span, is_registered: true, registration_use };
        }
        registration_use.starts.extend(ranges.overlapping(start, bytes));
        for start in &registration_use.starts {
            if let Some(known) = ranges.at(*start) {
                known.transfers += 1;
            }
        }
        Acquired { span: unregistered, is_registered: false, registration_use }
    }

    /// Registers contiguous GPU memory, and evicts the least recently used memory if needed.
    pub(crate) fn register_memory(
        self: &Arc<Self>,
        cufile: &CuFile,
        device: &Arc<Device>,
        memory: Region,
    ) -> Registered {
        let (gpu, start) = (device.index(), memory.addr());
        let (token, evicted) = self.register(cufile, device, &memory);
        Registered {
            registration: GpuRegistration { registrations: Arc::clone(self), gpu, start, token, _memory: memory },
            evicted,
        }
    }

    fn register(
        &self,
        cufile: &CuFile,
        device: &Arc<Device>,
        memory: &Region,
    ) -> (std::result::Result<Weak<()>, String>, u64) {
        let (gpu, start, bytes) = (device.index(), memory.addr(), memory.len());
        let _turn = lock(&self.registering);
        if lock(&self.by_gpu).entry(gpu).or_default().overlaps(start, bytes) {
            return (Err("some of it is registered already".into()), 0);
        }
        let bound = REGISTERED_BYTES_MAX.min(cufile.pinned_bytes_max());
        if bytes as u64 > bound {
            return (Err(format!("it has {bytes} bytes, and no more than {bound} of a GPU are registered at once")), 0);
        }
        let mut evicted = 0;
        while lock(&self.by_gpu).entry(gpu).or_default().bytes() + bytes as u64 > bound {
            if !self.evict(gpu) {
                return (Err("all registered memory is in use, and no room is left".into()), evicted);
            }
            evicted += 1;
        }
        loop {
            // SAFETY: `GpuRegistration` keeps the memory, and its drop ends the registration. If transfers use the
            // memory at that moment, the last one ends the registration, and its op keeps the memory until then.
            match unsafe { BufferRegistration::new(cufile, device, start, bytes, Box::new(())) } {
                Ok(registration) => {
                    let token = Arc::new(());
                    let weak = Arc::downgrade(&token);
                    let known = RegisteredRange { _registration: registration, token, transfers: 0, is_dropped: false };
                    lock(&self.by_gpu).entry(gpu).or_default().insert(start, bytes, known);
                    return (Ok(weak), evicted);
                }
                // The window may be smaller than the bound, and other processes may use some of it.
                Err(error) if error.is_pinning_failure() && self.evict(gpu) => evicted += 1,
                Err(error) => return (Err(error.to_string()), evicted),
            }
        }
    }

    fn evict(&self, gpu: u32) -> bool {
        let mut by_gpu = lock(&self.by_gpu);
        let idle = |known: &RegisteredRange| known.transfers == 0;
        by_gpu.get_mut(&gpu).and_then(|ranges| ranges.evict(idle)).map(drop).is_some()
    }
}

impl Drop for RegistrationUse {
    fn drop(&mut self) {
        let mut by_gpu = lock(&self.registrations.by_gpu);
        let Some(ranges) = by_gpu.get_mut(&self.gpu) else { return };
        for start in &self.starts {
            let is_last = ranges.at(*start).is_some_and(|known| {
                known.transfers -= 1;
                known.is_dropped && known.transfers == 0
            });
            if is_last {
                drop(ranges.remove(*start));
            }
        }
    }
}

impl GpuRegistration {
    /// Creates the registration of memory that cuFile has not registered, with the reason.
    pub(crate) fn without(reason: String, memory: Region) -> Self {
        let gpu = match memory.device() {
            Place::Cuda { index } => index,
            Place::Host => 0,
        };
        let (registrations, start) = (Registrations::of_process(), memory.addr());
        Self { registrations, gpu, start, token: Err(reason), _memory: memory }
    }

    /// Returns why the memory is not registered with cuFile, or `None` while it is.
    #[must_use]
    pub fn refusal(&self) -> Option<String> {
        match &self.token {
            Ok(token) if token.strong_count() > 0 => None,
            Ok(_) => Some("later registrations have evicted it".into()),
            Err(reason) => Some(reason.clone()),
        }
    }
}

impl Drop for GpuRegistration {
    fn drop(&mut self) {
        let Ok(token) = &self.token else { return };
        let mut by_gpu = lock(&self.registrations.by_gpu);
        let Some(ranges) = by_gpu.get_mut(&self.gpu) else { return };
        let Some(known) = ranges.at(self.start).filter(|known| Arc::as_ptr(&known.token) == token.as_ptr()) else {
            return;
        };
        known.is_dropped = true;
        if known.transfers == 0 {
            drop(ranges.remove(self.start));
        }
    }
}
