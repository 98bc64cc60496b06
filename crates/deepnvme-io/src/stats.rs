//! Counters per worker, summed on request.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hdrhistogram::Histogram;

use crate::backend::{BackendKind, gds};
use crate::op::Direction;
use crate::split::{IoMode, Route};
use crate::sync::{Mutex, lock};

/// Largest latency of the histogram. Longer ones count as this.
const LATENCY_US_MAX: u64 = 600_000_000;

/// The reason for a buffered read although direct I/O was requested.
pub(crate) const CACHED_REASON: &str = "most of the bytes were in the page cache";

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        #[derive(Debug, Default)]
        pub(crate) struct Counters { $(pub(crate) $name: AtomicU64),* }

        /// A snapshot of an engine's counters, which only grow.
        #[derive(Clone, Debug, PartialEq)]
        pub struct StatsSnapshot {
            $($(#[$doc])* pub $name: u64,)*
            /// The backend that moves the bytes.
            pub backend: BackendKind,
            /// Whether the bounce pool is pinned, and if not, why. `None` until a transfer needs it.
            pub pool_lock: Option<deepnvme_mem::LockState>,
            /// Bytes of bounce buffers that the engine has allocated.
            pub pool_bytes: u64,
            /// Latency of the blocks, from submission to completion.
            pub latency: LatencySummary,
            /// The first reason why a file's transfers were buffered although direct I/O was requested.
            pub buffered_reason: Option<String>,
            /// Why the driver stages copies to and from GPUs although the bounce buffers should be registered.
            pub staged_reason: Option<String>,
            /// The first reason why GPU transfers used bounce buffers although cuFile was requested.
            pub gds_reason: Option<String>,
        }

        impl Counters {
            fn add_to(&self, snapshot: &mut StatsSnapshot) {
                $(snapshot.$name += self.$name.load(Ordering::Relaxed);)*
            }
        }

        impl StatsSnapshot {
            fn zero(backend: BackendKind) -> Self {
                Self {
                    $($name: 0,)*
                    backend,
                    pool_lock: None,
                    pool_bytes: 0,
                    latency: LatencySummary::default(),
                    buffered_reason: None,
                    staged_reason: None,
                    gds_reason: None,
                }
            }

            /// Returns the counters by name, for reports.
            #[must_use]
            pub fn counters(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name)),*]
            }
        }
    };
}

counters! {
    /// Requests that have ended, successfully or not.
    requests,
    /// Requests that ended in an error.
    requests_failed,
    /// Ops submitted to the backend, including resubmissions.
    ops,
    /// Requested bytes that were read from files.
    bytes_read,
    /// Requested bytes that were written to files.
    bytes_written,
    /// Bytes that bypassed the page cache, directly from or to the caller's memory.
    bytes_direct,
    /// Bytes that bypassed the page cache, through a bounce buffer.
    bytes_bounced,
    /// Bytes read and written through the page cache.
    bytes_buffered,
    /// Ops that were interrupted, were temporarily refused (EINTR, EAGAIN) or moved nothing, and were submitted again.
    retries,
    /// Ops that moved less than requested, and were continued.
    short_ops,
    /// Syncs of files and folders.
    syncs,
    /// Copies between bounce buffers and GPUs that were started.
    gpu_copies,
    /// Bytes copied to GPUs.
    bytes_to_gpu,
    /// Bytes copied from GPUs.
    bytes_from_gpu,
    /// Bytes read and written between disk and GPU by cuFile.
    bytes_gds,
    /// Bytes of `bytes_gds` from and to memory registered with cuFile.
    bytes_gds_pinned,
    /// Submissions of several ops to cuFile (its batch API). All others are blocking calls.
    gds_batches,
    /// Registrations of GPU memory with cuFile.
    gds_pins,
    /// Registrations, of any engine, that were evicted for this engine's.
    gds_pins_evicted,
    /// Requests that waited for earlier work on a GPU stream.
    gpu_waits,
    /// Bytes of tensors that checkpoint loads have compared with checksums.
    bytes_compared,
    /// Bytes that loads have not compared, because the file has no checksums or the check would cost too much.
    bytes_not_compared,
}

impl StatsSnapshot {
    /// Sets cuFile's counters, which are per engine.
    pub(crate) fn set_gds(&mut self, counts: &gds::Counts) {
        self.gds_pins = counts.registrations;
        self.gds_pins_evicted = counts.registrations_evicted;
        self.gds_batches = counts.batches;
        self.bytes_gds_pinned = counts.bytes_registered;
    }
}

/// Latency of blocks in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LatencySummary {
    /// Blocks counted.
    pub count: u64,
    /// Shortest.
    pub min_us: u64,
    /// Median.
    pub p50_us: u64,
    /// 99th percentile.
    pub p99_us: u64,
    /// Longest.
    pub max_us: u64,
}

/// The counters of one worker.
#[derive(Debug)]
pub(crate) struct WorkerStats {
    pub(crate) counters: Counters,
    latency: Mutex<Option<Histogram<u64>>>,
    pool: Mutex<Option<(deepnvme_mem::LockState, u64)>>,
    pub(crate) buffered_reason: Mutex<Option<String>>,
    /// Why the driver stages copies to and from GPUs.
    pub(crate) staged_reason: Mutex<Option<String>>,
    /// Why GPU transfers do not use cuFile.
    pub(crate) gds_reason: Mutex<Option<String>>,
}

/// Counts the bytes of loads that were compared with checksums.
#[derive(Clone, Debug)]
pub struct Comparisons(pub(crate) Arc<WorkerStats>);

impl Comparisons {
    /// Adds compared and not compared bytes.
    pub fn add(&self, compared: u64, not_compared: u64) {
        WorkerStats::count(&self.0.counters.bytes_compared, compared);
        WorkerStats::count(&self.0.counters.bytes_not_compared, not_compared);
    }
}

impl WorkerStats {
    pub(crate) fn new() -> Self {
        let histogram = Histogram::new_with_bounds(1, LATENCY_US_MAX, 2).ok();
        Self {
            counters: Counters::default(),
            latency: Mutex::new(histogram),
            pool: Mutex::new(None),
            buffered_reason: Mutex::new(None),
            staged_reason: Mutex::new(None),
            gds_reason: Mutex::new(None),
        }
    }

    /// Counts a copy between a bounce buffer and a GPU.
    pub(crate) fn count_gpu_copy(&self, direction: Direction, bytes: u64) {
        let counter = match direction {
            Direction::Read => &self.counters.bytes_to_gpu,
            Direction::Write => &self.counters.bytes_from_gpu,
        };
        Self::count(counter, bytes);
        Self::count(&self.counters.gpu_copies, 1);
    }

    /// Records that a read came from the page cache although direct I/O was requested.
    pub(crate) fn read_from_cache(&self) {
        lock(&self.buffered_reason).get_or_insert_with(|| CACHED_REASON.into());
    }

    /// Counts allocated bounce buffers.
    pub(crate) fn pool_created(&self, state: deepnvme_mem::LockState, bytes: u64) {
        let mut pool = lock(&self.pool);
        let before = pool.as_ref().map_or(0, |(_, bytes)| *bytes);
        *pool = Some((state, before + bytes));
    }

    pub(crate) fn count(counter: &AtomicU64, by: u64) {
        counter.fetch_add(by, Ordering::Relaxed);
    }

    pub(crate) fn block_done(&self, direction: Direction, mode: IoMode, route: Route, bytes: u64, latency: Duration) {
        let counters = &self.counters;
        let by_direction = match direction {
            Direction::Read => &counters.bytes_read,
            Direction::Write => &counters.bytes_written,
        };
        let by_data_path = match (mode, route) {
            (IoMode::Direct, Route::Caller) => &counters.bytes_direct,
            (IoMode::Direct, Route::Bounce) => &counters.bytes_bounced,
            (_, Route::Gds) => &counters.bytes_gds,
            (IoMode::Buffered | IoMode::Cached, _) => &counters.bytes_buffered,
        };
        Self::count(by_direction, bytes);
        Self::count(by_data_path, bytes);
        if let Some(histogram) = &mut *lock(&self.latency) {
            histogram.saturating_record((latency.as_micros() as u64).max(1));
        }
    }
}

/// Returns the latency histogram of all workers: latencies, rounded up to two significant digits, and counts, in
/// ascending order.
pub(crate) fn latencies_us<'a>(workers: impl Iterator<Item = &'a WorkerStats>) -> Vec<(u64, u64)> {
    let all = all_latencies(workers);
    let steps = all.iter().flat_map(Histogram::iter_recorded);
    steps.map(|step| (step.value_iterated_to(), step.count_at_value())).collect()
}

fn all_latencies<'a>(workers: impl Iterator<Item = &'a WorkerStats>) -> Option<Histogram<u64>> {
    let mut all = Histogram::<u64>::new_with_bounds(1, LATENCY_US_MAX, 2).ok()?;
    for worker in workers {
        if let Some(one) = &*lock(&worker.latency) {
            // Both have the same bounds, so every value fits.
            let _ = all.add(one);
        }
    }
    Some(all)
}

/// Sums the workers' counters.
pub(crate) fn snapshot<'a>(
    backend: BackendKind,
    workers: impl Iterator<Item = &'a WorkerStats> + Clone,
) -> StatsSnapshot {
    let mut sum = StatsSnapshot::zero(backend);
    let latency = all_latencies(workers.clone());
    for worker in workers {
        worker.counters.add_to(&mut sum);
        if let Some((state, bytes)) = &*lock(&worker.pool) {
            sum.pool_lock = Some(state.clone());
            sum.pool_bytes += bytes;
        }
        if sum.buffered_reason.is_none() {
            sum.buffered_reason.clone_from(&lock(&worker.buffered_reason));
        }
        if sum.staged_reason.is_none() {
            sum.staged_reason.clone_from(&lock(&worker.staged_reason));
        }
        if sum.gds_reason.is_none() {
            sum.gds_reason.clone_from(&lock(&worker.gds_reason));
        }
    }
    if let Some(latency) = latency.filter(|latency| !latency.is_empty()) {
        sum.latency = LatencySummary {
            count: latency.len(),
            min_us: latency.min(),
            p50_us: latency.value_at_quantile(0.5),
            p99_us: latency.value_at_quantile(0.99),
            max_us: latency.max(),
        };
    }
    sum
}
