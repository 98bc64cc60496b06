//! The settings of an engine: what each means, its default, its range, and one place that checks them.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Which backend moves the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BackendChoice {
    /// The first that works here of `io_uring`, native AIO, threads.
    #[default]
    Auto,
    /// `io_uring`, or an error that says why not.
    #[serde(rename = "io_uring")]
    Uring,
    /// Linux native AIO, or an error that says why not.
    Aio,
    /// `preadv`/`pwritev` on threads; works everywhere.
    Threads,
}

/// When ops reach the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SubmitMode {
    /// Several with one system call.
    #[default]
    Batch,
    /// Each with its own system call.
    Single,
}

/// When the queue is filled again.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WindowMode {
    /// As soon as an op has completed: the device always has work.
    #[default]
    Sliding,
    /// When all of its ops have completed, as DeepSpeed does with `overlap_events=False`. Slower wherever ops take unequal
    /// times; for comparisons.
    Wave,
}

/// Whether transfers bypass the page cache.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DirectMode {
    /// Direct I/O, or an error.
    Required,
    /// Direct I/O where the file system has it, otherwise buffered; `stats` and `direct()` say which.
    #[default]
    Preferred,
    /// Always through the page cache.
    Disabled,
}

/// The settings of an [`Engine`](crate::Engine). `Config::default()` is right for most machines.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Default `Auto`.
    pub backend: BackendChoice,
    /// Threads that submit and reap, each with a queue of its own. 1 to 64; default: one per CPU, 4 at the most.
    pub workers: u32,
    /// Ops in flight per worker, at the most: no more than the device does in 200 ms, but 16 always. 1 to 4096; default 128.
    pub queue_depth: u32,
    /// Largest single op; a multiple of 4096, 4 KiB to 64 MiB; default 2 MiB. Ops that go through a bounce slot are at
    /// most 512 KiB large ([`slot_bytes`](Self::slot_bytes)): the slots then stay in the processor's caches.
    pub block_bytes: u64,
    /// Default `Batch`.
    pub submit: SubmitMode,
    /// Default `Sliding`.
    pub window: WindowMode,
    /// Default `Preferred`; a file may ask for another mode when it is opened.
    pub direct: DirectMode,
    /// Whether bytes of GPUs go past the host's memory, by way of cuFile (GPUDirect Storage). Default `Disabled`.
    pub gds: DirectMode,
    /// Upper bound of all bounce memory of the engine together; at least one slot per worker.
    /// `None` (default): 8 MiB per worker, 256 MiB at the most, and 1 MiB for small calls.
    pub pool_bytes: Option<u64>,
    /// Page-lock the pool where `RLIMIT_MEMLOCK` allows it. Default true.
    pub lock_pool: bool,
    /// Register the pool with the ring, so that the kernel need not look up its pages for every op. `io_uring` only. Default
    /// true.
    pub register_pool: bool,
}

/// The named limits of [`Config`].
pub mod limits {
    /// Most workers.
    pub const WORKERS_MAX: u32 = 64;
    /// Deepest queue of a worker.
    pub const QUEUE_DEPTH_MAX: u32 = 4096;
    /// Smallest block, and what every block size is a multiple of.
    pub const BLOCK_BYTES_MIN: u64 = 4096;
    /// Largest block.
    pub const BLOCK_BYTES_MAX: u64 = 64 << 20;
    /// Largest bounce slot.
    pub const SLOT_BYTES_MAX: u64 = 512 << 10;
    /// Bound of a worker's slots where none is given: sixteen of the largest, or more small ones.
    pub const POOL_BYTES_PER_WORKER: u64 = 8 << 20;
    /// Bound of all of them together.
    pub const POOL_BYTES_DEFAULT_MAX: u64 = 256 << 20;
    /// Bound of one GPU's memory that a process has registered with cuFile: small beside the window of a GPU for data centres, and
    /// what cuFile says of its own bound, or of a smaller window, comes first.
    pub const GDS_PINNED_BYTES_MAX: u64 = 8 << 30;
    /// Largest request that a waiting caller makes itself; larger ones gain more from a deep queue than they lose by
    /// waking its worker.
    pub const HAND_BYTES_MAX: u64 = 64 << 10;
    /// Most callers at once that do so; the requests of the others go to the workers.
    pub const HANDS_MAX: u64 = 16;
    /// Bounce memory of one of them: such a request, widened at both ends by the largest usual alignment.
    pub const HAND_SLOT_BYTES: u64 = HAND_BYTES_MAX + 2 * 4096;
}

impl Default for Config {
    fn default() -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u32;
        Self {
            backend: BackendChoice::Auto,
            workers: cpus.clamp(1, 4),
            queue_depth: 128,
            block_bytes: 2 << 20,
            submit: SubmitMode::Batch,
            window: WindowMode::Sliding,
            direct: DirectMode::Preferred,
            gds: DirectMode::Disabled,
            pool_bytes: None,
            lock_pool: true,
            register_pool: true,
        }
    }
}

impl Config {
    /// Checks every field and what they mean together.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput), naming the field, its value and its range.
    pub fn validate(&self) -> Result<()> {
        use limits::{BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, QUEUE_DEPTH_MAX, WORKERS_MAX};
        in_range("workers", u64::from(self.workers), 1, u64::from(WORKERS_MAX))?;
        in_range("queue_depth", u64::from(self.queue_depth), 1, u64::from(QUEUE_DEPTH_MAX))?;
        in_range("block_bytes", self.block_bytes, BLOCK_BYTES_MIN, BLOCK_BYTES_MAX)?;
        if !self.block_bytes.is_multiple_of(BLOCK_BYTES_MIN) {
            return Err(Error::invalid(format!(
                "block_bytes is {}; it must be a multiple of {BLOCK_BYTES_MIN}",
                self.block_bytes
            )));
        }
        let smallest_pool = u64::from(self.workers) * self.slot_bytes();
        if let Some(pool_bytes) = self.pool_bytes
            && pool_bytes < smallest_pool
        {
            return Err(Error::invalid(format!(
                "pool_bytes is {pool_bytes}; it must be at least {smallest_pool}: a slot of {} for each worker",
                self.slot_bytes()
            )));
        }
        Ok(())
    }

    /// Bytes of one bounce slot: a block, 512 KiB at the most.
    #[must_use]
    pub fn slot_bytes(&self) -> u64 {
        self.block_bytes.min(limits::SLOT_BYTES_MAX)
    }

    /// Bounce slots of one worker: the pool's bound shared out, never more than its queue is deep.
    #[must_use]
    pub fn slots_per_worker(&self) -> u32 {
        let bound = match self.pool_bytes {
            Some(pool_bytes) => pool_bytes - self.hand_slots() * limits::HAND_SLOT_BYTES,
            None => (u64::from(self.workers) * limits::POOL_BYTES_PER_WORKER).min(limits::POOL_BYTES_DEFAULT_MAX),
        };
        let slots = bound / u64::from(self.workers) / self.slot_bytes();
        slots.clamp(1, u64::from(self.queue_depth)) as u32
    }

    /// Bounce slots for small transfers that callers make themselves: none where a queue was chosen for every
    /// transfer, and never at the price of a worker's last slot.
    pub(crate) fn hand_slots(&self) -> u64 {
        if !matches!(self.backend, BackendChoice::Auto | BackendChoice::Threads) {
            return 0;
        }
        let spare_bytes = match self.pool_bytes {
            Some(pool_bytes) => (pool_bytes / 16).min(pool_bytes - u64::from(self.workers) * self.slot_bytes()),
            None => u64::MAX,
        };
        (spare_bytes / limits::HAND_SLOT_BYTES).min(limits::HANDS_MAX)
    }

    /// The most bounce memory that the engine ever holds, in bytes.
    #[must_use]
    pub fn pool_bound_bytes(&self) -> u64 {
        let slots = u64::from(self.workers) * u64::from(self.slots_per_worker());
        slots * self.slot_bytes() + self.hand_slots() * limits::HAND_SLOT_BYTES
    }
}

fn in_range(field: &str, value: u64, min: u64, max: u64) -> Result<()> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(Error::invalid(format!("{field} is {value}; it must be between {min} and {max}")))
}
