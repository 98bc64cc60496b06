//! All state there is, under one lock, with one condition for everything that anyone waits for.
//!
//! One lock is enough: bytes move outside of it, and a test suite is no place for contention to matter.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::abi::{CONTEXT_IS_DESTROYED, Device, Handle, INVALID_CONTEXT, INVALID_DEVICE, Outcome};
use crate::config::Config;
use crate::cufile::CuFile;
use crate::event::Events;
use crate::host::Host;
use crate::ledger::Ledger;
use crate::memory::Memory;
use crate::order::Tracker;
use crate::rng::Rng;
use crate::stream::Streams;

/// The state, locked.
pub(crate) type Guard = MutexGuard<'static, World>;

/// Everything.
pub(crate) struct World {
    pub(crate) config: Config,
    pub(crate) initialised: bool,
    pub(crate) ledger: Ledger,
    pub(crate) devices: Vec<Primary>,
    /// The device of each primary context that lives.
    pub(crate) contexts: HashMap<Handle, Device>,
    pub(crate) streams: Streams,
    pub(crate) events: Events,
    pub(crate) memory: Memory,
    pub(crate) host: Host,
    pub(crate) order: Tracker,
    pub(crate) cufile: CuFile,
    handles: Handle,
}

/// A device's primary context.
#[derive(Clone, Debug, Default)]
pub(crate) struct Primary {
    pub(crate) retained: u32,
    pub(crate) context: Option<Handle>,
}

static WORLD: LazyLock<Mutex<World>> = LazyLock::new(|| Mutex::new(World::new(Config::from_environment())));
static CHANGED: Condvar = Condvar::new();
/// The process that called `cuInit`, or 0. A fork has none of its threads.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// Whether this is a forked child of a process that had initialised: nothing works there, as with a driver.
pub(crate) fn is_forked() -> bool {
    let owner = OWNER.load(Ordering::Relaxed);
    owner != 0 && owner != std::process::id()
}

/// Locks the state.
pub(crate) fn lock() -> Guard {
    WORLD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Wakes all who wait: something they may wait for has changed.
pub(crate) fn notify() {
    CHANGED.notify_all();
}

/// Waits, with the lock given up meanwhile, until the state is as wanted.
pub(crate) fn wait_until(mut world: Guard, mut wanted: impl FnMut(&World) -> bool) -> Guard {
    while !wanted(&world) {
        world = CHANGED.wait(world).unwrap_or_else(PoisonError::into_inner);
    }
    world
}

/// Like [`wait_until`], until a moment at most.
pub(crate) fn wait_until_or(mut world: Guard, end: Instant, mut wanted: impl FnMut(&World) -> bool) -> Guard {
    while !wanted(&world) {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        world = CHANGED.wait_timeout(world, left).unwrap_or_else(PoisonError::into_inner).0;
    }
    world
}

impl World {
    fn new(config: Config) -> Self {
        stay_loaded();
        Self {
            initialised: false,
            ledger: Ledger::new(&config.faults),
            devices: vec![Primary::default(); usize::try_from(config.devices).unwrap_or(0)],
            contexts: HashMap::new(),
            streams: Streams::default(),
            events: Events::default(),
            memory: Memory::default(),
            host: Host::default(),
            order: Tracker::default(),
            cufile: CuFile::new(config.compat),
            handles: 0x5354_414e_0000,
            config,
        }
    }

    /// `cuInit`.
    pub(crate) fn initialise(&mut self) {
        self.initialised = true;
        OWNER.store(std::process::id(), Ordering::Relaxed);
    }

    /// A handle that nobody ever had.
    pub(crate) fn handle(&mut self) -> Handle {
        self.handles += 0x10;
        self.handles
    }

    /// Random numbers for a purpose of its own.
    pub(crate) fn rng(&self, key: Handle) -> Rng {
        Rng::keyed(self.config.seed, key)
    }

    /// A device by its ordinal.
    pub(crate) fn device(&mut self, device: Device) -> Outcome<&mut Primary> {
        let index = usize::try_from(device).map_err(|_| INVALID_DEVICE)?;
        self.devices.get_mut(index).ok_or(INVALID_DEVICE)
    }

    /// The device whose context is current on this thread.
    pub(crate) fn current(&self) -> Outcome<Device> {
        let context = crate::calls::current_context().ok_or(INVALID_CONTEXT)?;
        self.contexts.get(&context).copied().ok_or(CONTEXT_IS_DESTROYED)
    }

    /// Takes note of violations that somebody found.
    pub(crate) fn violations(&mut self, found: Vec<String>) {
        for text in found {
            self.ledger.violation(text);
        }
    }

    /// Bytes that a device has left.
    pub(crate) fn room(&self, device: Device) -> u64 {
        let used: u64 = self.memory.of(Some(device)).map(|allocation| allocation.bytes as u64).sum();
        self.config.memory_bytes.saturating_sub(used)
    }
}

/// Threads of streams run this library's code, so it must never be unloaded, whatever its loader does.
fn stay_loaded() {
    // SAFETY: `dladdr` gets an address in this library and room for its answer, and what it answers with is a
    // string that lives as long as the library; `dlopen` raises a count that nobody lowers.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        let address: *const libc::c_void = (&raw const CHANGED).cast();
        if libc::dladdr(address, &raw mut info) != 0 && !info.dli_fname.is_null() {
            libc::dlopen(info.dli_fname, libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE);
        }
    }
}
