//! All state, under one lock, with one condition variable.
//!
//! One lock is enough: bytes are moved without it, and contention does not matter in tests. The modules are the parts
//! of the state. None of them uses [`DriverState`]. Functions that need several parts are in `operations` and `cufile`.
//!
//! | module | part |
//! | --- | --- |
//! | `call_log` | counted calls, pending faults, counters, violations |
//! | `context` | primary contexts, and the current ones of each thread |
//! | `stream`, `op_queue` | streams, and the ops that they have not begun |
//! | `clock`, `race_detector` | the order of ops, and those that the host has not synchronised with |
//! | `event`, `capture` | events, stream captures |
//! | `memory`, `host`, `mapped_range` | memory of devices, memory of the host that they reach, and bytes of an op |
//! | `cufile` | cuFile |

pub(crate) mod call_log;
pub(crate) mod capture;
pub(crate) mod clock;
pub(crate) mod context;
pub(crate) mod cufile;
pub(crate) mod event;
pub(crate) mod host;
pub(crate) mod mapped_range;
pub(crate) mod memory;
pub(crate) mod op_queue;
pub(crate) mod race_detector;
pub(crate) mod stream;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use self::call_log::CallLog;
use self::capture::Captures;
use self::context::PrimaryContext;
use self::cufile::CuFile;
use self::event::Events;
use self::host::Host;
use self::memory::Memory;
use self::race_detector::RaceDetector;
use self::stream::Streams;
use crate::abi::{CONTEXT_IS_DESTROYED, Device, Handle, INVALID_CONTEXT, INVALID_DEVICE, Outcome};
use crate::config::Config;
use crate::rng::Rng;

/// The locked state.
pub(crate) type DriverGuard = MutexGuard<'static, DriverState>;

/// All state.
pub(crate) struct DriverState {
    pub(crate) config: Config,
    pub(crate) initialised: bool,
    pub(crate) call_log: CallLog,
    /// The primary context of each device, by ordinal.
    pub(crate) devices: Vec<PrimaryContext>,
    /// The device of each live primary context.
    pub(crate) contexts: HashMap<Handle, Device>,
    pub(crate) streams: Streams,
    pub(crate) events: Events,
    pub(crate) memory: Memory,
    pub(crate) host: Host,
    pub(crate) races: RaceDetector,
    pub(crate) cufile: CuFile,
    pub(crate) captures: Captures,
    handles: Handle,
}

static STATE: LazyLock<Mutex<DriverState>> = LazyLock::new(|| Mutex::new(DriverState::new(Config::from_environment())));
static CHANGED: Condvar = Condvar::new();
/// The process that called `cuInit`, or 0. A forked child has none of its threads.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// Returns whether this is a forked child of an initialised process. Only the texts of errors work there, as with a
/// real driver.
pub(crate) fn is_forked() -> bool {
    let owner = OWNER.load(Ordering::Relaxed);
    owner != 0 && owner != std::process::id()
}

/// Locks the state.
pub(crate) fn lock() -> DriverGuard {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Wakes all waiting threads after a change.
pub(crate) fn notify() {
    CHANGED.notify_all();
}

/// Waits without the lock until the state satisfies the condition.
pub(crate) fn wait_until(mut state: DriverGuard, mut wanted: impl FnMut(&DriverState) -> bool) -> DriverGuard {
    while !wanted(&state) {
        state = CHANGED.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
    state
}

/// Waits as [`wait_until`], at most until `end`.
pub(crate) fn wait_until_or(
    mut state: DriverGuard,
    end: Instant,
    mut wanted: impl FnMut(&DriverState) -> bool,
) -> DriverGuard {
    while !wanted(&state) {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        state = CHANGED.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
    }
    state
}

impl DriverState {
    fn new(config: Config) -> Self {
        stay_loaded();
        Self {
            initialised: false,
            call_log: CallLog::new(&config.faults),
            devices: vec![PrimaryContext::default(); config.devices.count],
            contexts: HashMap::new(),
            streams: Streams::default(),
            events: Events::default(),
            memory: Memory::default(),
            host: Host::default(),
            races: RaceDetector::default(),
            cufile: CuFile::new(config.compat),
            captures: Captures::default(),
            handles: 0x5354_414e_0000,
            config,
        }
    }

    /// `cuInit`.
    pub(crate) fn initialise(&mut self) {
        self.initialised = true;
        OWNER.store(std::process::id(), Ordering::Relaxed);
    }

    /// Returns a new handle, never used before.
    pub(crate) fn handle(&mut self) -> Handle {
        self.handles += 0x10;
        self.handles
    }

    /// Returns a random generator for a key.
    pub(crate) fn rng(&self, key: Handle) -> Rng {
        Rng::keyed(self.config.seed, key)
    }

    /// Returns the primary context of a device by its ordinal.
    pub(crate) fn device(&mut self, device: Device) -> Outcome<&mut PrimaryContext> {
        let index = usize::try_from(device).map_err(|_| INVALID_DEVICE)?;
        self.devices.get_mut(index).ok_or(INVALID_DEVICE)
    }

    /// Returns the device whose context is current on this thread.
    pub(crate) fn current(&self) -> Outcome<Device> {
        let context = context::current_context().ok_or(INVALID_CONTEXT)?;
        self.contexts.get(&context).copied().ok_or(CONTEXT_IS_DESTROYED)
    }

    /// Records violations.
    pub(crate) fn record_violations(&mut self, found: Vec<String>) {
        for text in found {
            self.call_log.violation(text);
        }
    }

    /// Returns the free memory of a device.
    pub(crate) fn free_bytes(&self, device: Device) -> u64 {
        let used: u64 = self.memory.of(Some(device)).map(|allocation| allocation.bytes as u64).sum();
        self.config.devices.memory_bytes.saturating_sub(used)
    }
}

/// Keeps the library loaded: threads of streams run its code.
fn stay_loaded() {
    // SAFETY: `dladdr` gets an address in this library and a place for its result, a string that lives as long as the
    // library. `dlopen` increments a count that is never decremented.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        let address: *const libc::c_void = (&raw const CHANGED).cast();
        if libc::dladdr(address, &raw mut info) != 0 && !info.dli_fname.is_null() {
            libc::dlopen(info.dli_fname, libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE);
        }
    }
}
