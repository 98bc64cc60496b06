//! An engine's cuFile: the lazily opened library, its devices, the registered files and memory, and single transfers.
#![allow(unsafe_code)]

use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use deepnvme_cuda::{CuFile, IoError, IoResult, libraries_loaded};
use deepnvme_mem::{Device, PAGE_BYTES, Region};

use super::batches::Batches;
use super::file_systems::{Directness, FileSystems, device_of, judge, obstacle_of};
use super::registrations::{Acquired, GpuRegistration, Registered, Registrations};
use crate::error::{Error, Result};
use crate::op::{Errno, Op, OpKind, RegisteredFile};
use crate::sync::{Mutex, lock};

/// How often a trial is repeated while transfers of others hide its answer.
const TRIALS_MAX: u32 = 3;

/// Opens CUDA devices by their index, each once.
pub(crate) trait CudaDevices: Debug + Send + Sync {
    /// Returns a device.
    ///
    /// # Errors
    /// `Unsupported` and `Device` if there is no such device, or its driver refuses.
    fn cuda_device(&self, index: u32) -> Result<Arc<deepnvme_cuda::Device>>;
}

/// An engine's cuFile, opened by the first request that can use it.
#[derive(Debug)]
pub(crate) struct Gds {
    devices: Arc<dyn CudaDevices>,
    opened: OnceLock<CuFile>,
    /// Why cuFile was not opened. Locked while opening.
    failure: Mutex<Option<OpenFailure>>,
    pub(super) batches: Batches,
    pub(super) registrations: Arc<Registrations>,
    file_systems: FileSystems,
    /// Registrations of memory.
    registered: AtomicU64,
    /// Registrations that were evicted for this engine's.
    evicted: AtomicU64,
    /// Bytes moved from and to registered memory.
    bytes_registered: AtomicU64,
}

/// Why cuFile was not opened.
#[derive(Debug)]
struct OpenFailure {
    reason: String,
    /// If the library was not found: how many libraries the process had loaded. Another search is made once it has
    /// loaded more: torch, for instance, brings cuFile with it.
    libraries: Option<u64>,
}

/// Counters of an engine's use of cuFile.
pub(crate) struct Counts {
    /// Registrations of memory.
    pub(crate) registrations: u64,
    /// Registrations that were evicted for this engine's.
    pub(crate) registrations_evicted: u64,
    /// Submissions of several transfers.
    pub(crate) batches: u64,
    /// Bytes from and to registered memory.
    pub(crate) bytes_registered: u64,
}

impl Gds {
    pub(crate) fn new(devices: Arc<dyn CudaDevices>) -> Self {
        Self {
            devices,
            opened: OnceLock::new(),
            failure: Mutex::default(),
            batches: Batches::default(),
            registrations: Registrations::of_process(),
            file_systems: FileSystems::default(),
            registered: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
            bytes_registered: AtomicU64::new(0),
        }
    }

    /// Registers GPU memory with cuFile. If cuFile refuses, the result has the reason.
    pub(crate) fn register_memory(&self, memory: Region) -> Result<GpuRegistration> {
        let Device::Cuda { index } = memory.device() else {
            return Err(Error::invalid("only GPU memory can be registered with cuFile; this is host memory"));
        };
        if !memory.is_contiguous() || memory.is_empty() {
            return Err(Error::invalid("only contiguous, non-empty memory can be registered with cuFile"));
        }
        let device = self.device(index)?;
        let cufile = match self.cufile() {
            Ok(cufile) => cufile,
            Err(reason) => return Ok(GpuRegistration::without(reason, memory)),
        };
        let Registered { registration, evicted } = self.registrations.register_memory(cufile, &device, memory);
        self.evicted.fetch_add(evicted, Ordering::Relaxed);
        self.registered.fetch_add(u64::from(registration.refusal().is_none()), Ordering::Relaxed);
        Ok(registration)
    }

    /// Returns the GPU with this index, for cuFile.
    pub(super) fn device(&self, index: u32) -> Result<Arc<deepnvme_cuda::Device>> {
        self.devices.cuda_device(index)
    }

    /// Returns the counters so far.
    pub(crate) fn counts(&self) -> Counts {
        Counts {
            registrations: self.registered.load(Ordering::Relaxed),
            registrations_evicted: self.evicted.load(Ordering::Relaxed),
            batches: self.batches.submissions.load(Ordering::Relaxed),
            bytes_registered: self.bytes_registered.load(Ordering::Relaxed),
        }
    }

    /// Returns cuFile, or the reason why it cannot be used.
    pub(crate) fn cufile(&self) -> std::result::Result<&CuFile, String> {
        if let Some(cufile) = self.opened.get() {
            return Ok(cufile);
        }
        let mut failure = lock(&self.failure);
        // Another thread may have opened it meanwhile.
        if let Some(cufile) = self.opened.get() {
            return Ok(cufile);
        }
        let is_final = |libraries: Option<u64>| libraries.is_none_or(|libraries| libraries == libraries_loaded());
        if let Some(known) = failure.as_ref().filter(|known| is_final(known.libraries)) {
            return Err(known.reason.clone());
        }
        match CuFile::open() {
            Ok(cufile) => {
                *failure = None;
                Ok(self.opened.get_or_init(|| cufile))
            }
            Err(absent) => {
                let reason = absent.to_string();
                let libraries = absent.is_missing().then(libraries_loaded);
                *failure = Some(OpenFailure { reason: reason.clone(), libraries });
                Err(reason)
            }
        }
    }

    /// Registers a file with cuFile until the result is dropped. Returns the reason if cuFile is not available, refuses
    /// the file, or would copy through the host, as far as that is known before a transfer.
    pub(crate) fn register_file(&self, file: &Arc<OwnedFd>) -> std::result::Result<RegisteredFile, String> {
        let cufile = self.cufile()?;
        if cufile.refuses_copies() {
            return RegisteredFile::register(cufile, file, None);
        }
        let device = device_of(file);
        let refusal = match device.filter(|_| cufile.has_statistics()) {
            Some(device) => self.file_systems.refusal(device),
            None => obstacle_of(device),
        };
        match refusal {
            Some(reason) => Err(reason),
            None => RegisteredFile::register(cufile, file, device.filter(|_| cufile.has_statistics())),
        }
    }

    /// Returns the largest block that cuFile moves in one transfer, up to `most`.
    pub(crate) fn block_bytes(&self, most: u64) -> u64 {
        let limit = self.cufile().map_or(most, CuFile::transfer_bytes_max) / PAGE_BYTES * PAGE_BYTES;
        most.min(limit.max(PAGE_BYTES))
    }

    /// Returns whether an op is direct. `Unknown` on a file system that needs a trial.
    pub(super) fn directness(&self, op: &Op) -> Directness {
        let untried = op.cufile.as_ref().and_then(RegisteredFile::untried);
        untried.map_or(Directness::Direct, |device| self.file_systems.directness(device, op.kind))
    }

    /// Performs one op with one call.
    pub(crate) fn perform(&self, op: &Op) -> std::result::Result<usize, Errno> {
        let (moved, is_registered) = self.transfer(op)?;
        self.record_result(op, moved, is_registered)
    }

    /// Performs an op on a file system that was not tried, and lets cuFile's statistics judge, or the rules for file
    /// systems if these cannot tell. An op that was copied through the host counts as refused, and the worker repeats
    /// it with a bounce buffer.
    pub(super) fn perform_trial(&self, op: &Op) -> std::result::Result<usize, Errno> {
        let (Some(device), Ok(cufile)) = (op.cufile.as_ref().and_then(RegisteredFile::untried), self.cufile()) else {
            return self.perform(op);
        };
        let _turn = lock(&self.file_systems.trial);
        let mut directness = self.file_systems.directness(device, op.kind);
        if directness == Directness::Direct {
            return self.perform(op);
        }
        let (mut moved, mut copies) = (None, 0);
        // Transfers of others at the same time can hide the answer.
        for _ in 0..TRIALS_MAX {
            if directness != Directness::Unknown {
                break;
            }
            let (transferred, counts) = cufile.counted(op.kind == OpKind::Read, || self.transfer(op));
            let (result, is_registered) = transferred?;
            if !matches!(&result, Ok(1..)) {
                return self.record_result(op, result, is_registered);
            }
            moved = Some((result, is_registered));
            directness = counts.map_or(Directness::Unknown, judge);
            copies = counts.map_or(0, |counts| counts.posix);
        }
        if directness == Directness::Unknown && copies > 0 {
            directness =
                Directness::Copied("cuFile copies through host memory in this process, perhaps also here".into());
        } else if directness == Directness::Unknown {
            directness = obstacle_of(Some(device)).map_or(Directness::Direct, Directness::Copied);
        }
        self.file_systems.learn(device, op.kind, &directness);
        match (directness, moved) {
            (Directness::Copied(reason), _) => {
                refuse(op, reason);
                Err(Errno::OPNOTSUPP)
            }
            (_, Some((result, is_registered))) => self.record_result(op, result, is_registered),
            (_, None) => self.perform(op),
        }
    }

    /// Moves the bytes of an op with one call. Returns also whether all of the memory is registered.
    fn transfer(&self, op: &Op) -> std::result::Result<(IoResult, bool), Errno> {
        let (Some(file), [memory]) = (&op.cufile, &op.iovecs[..]) else { return Err(Errno::BADF) };
        let Device::Cuda { index } = memory.device() else { return Err(Errno::INVAL) };
        let device = self.device(index).map_err(|_| Errno::NODEV)?;
        let Acquired { span, is_registered, registration_use } =
            self.registrations.acquire(index, memory.addr(), memory.len());
        // SAFETY: the op keeps the memory, which is contiguous on that device, as the router of blocks ensures. Callers
        // order the requests that use the same memory.
        let moved = unsafe {
            match op.kind {
                OpKind::Read => file.handle().read(&device, span, op.offset),
                _ => file.handle().write(&device, span, op.offset),
            }
        };
        drop(registration_use);
        Ok((moved, is_registered))
    }

    /// Counts the bytes of a transfer, or records a refusal. Returns the op's result.
    pub(super) fn record_result(
        &self,
        op: &Op,
        moved: std::result::Result<usize, IoError>,
        is_registered: bool,
    ) -> std::result::Result<usize, Errno> {
        match moved {
            Ok(bytes) => {
                self.bytes_registered.fetch_add(if is_registered { bytes as u64 } else { 0 }, Ordering::Relaxed);
                Ok(bytes)
            }
            Err(error) => {
                refuse(op, error.to_string());
                Err(errno_of(&error))
            }
        }
    }
}

/// Records why cuFile did not perform an op.
pub(super) fn refuse(op: &Op, reason: String) {
    if let Some(file) = &op.cufile {
        file.refuse(reason);
    }
}

/// Returns the kernel's error number. For cuFile's own errors, `OPNOTSUPP`: another path may work.
fn errno_of(error: &IoError) -> Errno {
    match error {
        IoError::Kernel(errno) => Errno::from_raw_os_error(*errno),
        IoError::CuFile(..) => Errno::OPNOTSUPP,
        IoError::Device(_) => Errno::IO,
    }
}
