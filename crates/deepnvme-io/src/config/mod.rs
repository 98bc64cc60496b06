//! The settings of an engine: meaning, default, range, and validation.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::op::SubmitMode;

/// The choice of backend.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BackendChoice {
    /// The first that works here: `io_uring`, native AIO, threads.
    #[default]
    Auto,
    /// `io_uring`, or an error with the reason.
    #[serde(rename = "io_uring")]
    Uring,
    /// Linux native AIO, or an error with the reason.
    Aio,
    /// `preadv`/`pwritev` on threads. Works everywhere.
    Threads,
}

/// When the queue is refilled.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WindowMode {
    /// After each completion, so that the device always has work.
    #[default]
    Sliding,
    /// When it has drained: all of its ops have completed, as DeepSpeed does with `overlap_events=False`. Slower if ops
    /// take unequal times. For comparisons.
    Drain,
}

/// Whether transfers bypass the page cache, or host memory for [`Config::gds`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DirectMode {
    /// Direct I/O, or an error.
    Required,
    /// Direct I/O if the file system supports it, otherwise buffered. `stats` and `direct()` report which. Reads of bytes
    /// that are in the page cache use it.
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
    /// Threads that submit and reap, each with its own queue. 1 to 64. Default: one per CPU, at most 4.
    pub workers: u32,
    /// Maximum ops in flight per worker. A slow device gets fewer: as many as complete in 200 ms, but at least 16. 1 to
    /// 4096, default 128.
    pub queue_depth: u32,
    /// Largest op: a multiple of 4096, 4 KiB to 64 MiB, default 2 MiB. Ops through a bounce buffer or the page cache
    /// are at most 512 KiB ([`bounce_buffer_bytes`](Self::bounce_buffer_bytes)), so that the bounce buffers stay in the
    /// CPU's caches.
    pub block_bytes: u64,
    /// Default `Batch`.
    pub submit: SubmitMode,
    /// Default `Sliding`.
    pub window: WindowMode,
    /// Default `Preferred`. A file may request another mode when it is opened.
    pub direct: DirectMode,
    /// Whether GPU transfers bypass host memory with cuFile (GPUDirect Storage). Default `Disabled`.
    pub gds: DirectMode,
    /// Maximum bytes of the engine's bounce buffers. At least one bounce buffer per worker. `None` (default): 8 MiB per
    /// worker, at most 256 MiB, plus 1.125 MiB for small requests that callers run themselves.
    pub pool_bytes: Option<u64>,
    /// Pin the bounce buffers if `RLIMIT_MEMLOCK` allows it. Default true.
    pub lock_pool: bool,
    /// Register the bounce buffers with the ring, so that the kernel need not look up their pages for every op.
    /// `io_uring` only. Default true.
    pub register_pool: bool,
}

/// The limits of [`Config`].
pub mod limits {
    use deepnvme_mem::PAGE_BYTES;

    /// Maximum workers.
    pub const WORKERS_MAX: u32 = 64;
    /// Maximum queue depth of a worker.
    pub const QUEUE_DEPTH_MAX: u32 = 4096;
    /// Smallest block. Every block size is a multiple of it.
    pub const BLOCK_BYTES_MIN: u64 = PAGE_BYTES;
    /// Largest block.
    pub const BLOCK_BYTES_MAX: u64 = 64 << 20;
    /// Largest bounce buffer.
    pub const BOUNCE_BUFFER_BYTES_MAX: u64 = 512 << 10;
    /// Default bound of a worker's bounce buffers: sixteen of the largest, or more small ones.
    pub const POOL_BYTES_PER_WORKER: u64 = 8 << 20;
    /// Default bound of the bounce buffers of all workers.
    pub const POOL_BYTES_DEFAULT_MAX: u64 = 256 << 20;
    /// Largest request that a waiting caller runs itself. Larger ones gain more from a deep queue than they lose by
    /// waking a worker.
    pub const INLINE_BYTES_MAX: u64 = 64 << 10;
    /// Maximum callers that run a request themselves at one time. Other requests go to the workers.
    pub const INLINE_CALLERS_MAX: u64 = 16;
    /// Bounce buffer of such a caller: its largest request, widened at both ends by the largest usual alignment.
    pub const INLINE_BUFFER_BYTES: u64 = INLINE_BYTES_MAX + 2 * PAGE_BYTES;
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
    /// Validates every field and their combination.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput), with the field, its value and its range.
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
        let smallest_pool = u64::from(self.workers) * self.bounce_buffer_bytes();
        if let Some(pool_bytes) = self.pool_bytes
            && pool_bytes < smallest_pool
        {
            return Err(Error::invalid(format!(
                "pool_bytes is {pool_bytes}; it must be at least {smallest_pool}: a bounce buffer of {} bytes for each worker",
                self.bounce_buffer_bytes()
            )));
        }
        Ok(())
    }

    /// Returns the bytes of one bounce buffer: a block, at most 512 KiB.
    #[must_use]
    pub fn bounce_buffer_bytes(&self) -> u64 {
        self.block_bytes.min(limits::BOUNCE_BUFFER_BYTES_MAX)
    }

    /// Returns the number of bounce buffers of one worker: its share of the bound, from 1 to its queue depth. The
    /// settings must be valid.
    #[must_use]
    pub fn bounce_buffers_per_worker(&self) -> u32 {
        let bound = match self.pool_bytes {
            Some(pool_bytes) => pool_bytes - self.inline_buffers() * limits::INLINE_BUFFER_BYTES,
            None => (u64::from(self.workers) * limits::POOL_BYTES_PER_WORKER).min(limits::POOL_BYTES_DEFAULT_MAX),
        };
        let buffers = bound / u64::from(self.workers) / self.bounce_buffer_bytes();
        buffers.clamp(1, u64::from(self.queue_depth)) as u32
    }

    /// Returns the number of bounce buffers for small requests that callers run themselves. 0 if the settings ask for
    /// `io_uring` or AIO. They take at most a sixteenth of `pool_bytes`, and never a worker's last bounce buffer.
    pub(crate) fn inline_buffers(&self) -> u64 {
        if !matches!(self.backend, BackendChoice::Auto | BackendChoice::Threads) {
            return 0;
        }
        let spare_bytes = match self.pool_bytes {
            Some(pool_bytes) => {
                (pool_bytes / 16).min(pool_bytes - u64::from(self.workers) * self.bounce_buffer_bytes())
            }
            None => u64::MAX,
        };
        (spare_bytes / limits::INLINE_BUFFER_BYTES).min(limits::INLINE_CALLERS_MAX)
    }

    /// Returns the maximum bytes of bounce buffers that the engine ever holds. The settings must be valid.
    #[must_use]
    pub fn pool_bound_bytes(&self) -> u64 {
        let buffers = u64::from(self.workers) * u64::from(self.bounce_buffers_per_worker());
        buffers * self.bounce_buffer_bytes() + self.inline_buffers() * limits::INLINE_BUFFER_BYTES
    }
}

fn in_range(field: &str, value: u64, min: u64, max: u64) -> Result<()> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(Error::invalid(format!("{field} is {value}; it must be between {min} and {max}")))
}
