//! The engine: owns the workers, accepts requests and sums statistics.
//!
//! `layout` turns the tensors of a call into a request, and `start` has the engine's threads.

mod layout;
mod start;

use std::sync::{Arc, OnceLock};

use deepnvme_mem::{Region, RegionMut};

use self::layout::RequestPlanner;
pub use self::layout::{ReadItem, WriteItem};
pub use self::start::BackendFactory;
use self::start::{EngineThreads, WorkerParts};
use crate::backend::gds::{Gds, GpuRegistration};
use crate::backend::{self, BackendKind};
use crate::config::{BackendChoice, Config};
use crate::error::{Error, Result};
use crate::file::TensorFile;
use crate::gpu::{EngineGpus, GpuAccess};
use crate::probe::Probe;
use crate::request::{
    Durability, OpaqueMemory, Priority, Request, RequestQueue, Transfer, TransferMemory, WriteMode, WriteOptions,
    take_memory,
};
use crate::start::start_thread;
use crate::stats::{self, Comparisons, StatsSnapshot, WorkerStats};
use crate::sync::thread;
use crate::trace::{Lane, Recorder, Recording, Tracer};
use crate::worker::InlineExecutor;

/// Moves bytes between files and memory. Threads may share it. Dropping it waits for the submitted requests, unless it
/// was [made to drop in the background](Self::dropped_in_background).
#[derive(Debug)]
pub struct Engine {
    config: Config,
    probe: Probe,
    backend: BackendKind,
    backend_reason: String,
    queue: Arc<RequestQueue>,
    stats: Vec<Arc<WorkerStats>>,
    threads: Arc<EngineThreads>,
    drops_in_background: bool,
    /// `None` if the caller made the backends.
    inline: Option<InlineExecutor>,
    gpus: Arc<EngineGpus>,
    gds: Arc<Gds>,
    recorder: Arc<Recorder>,
    planner: RequestPlanner,
}

impl Engine {
    /// Starts the workers with the backend that the settings choose.
    ///
    /// # Errors
    /// `InvalidInput` if a setting is out of range. `Unsupported` if the requested backend does not work here. The
    /// errors of opening the backends and of starting threads.
    #[expect(clippy::needless_pass_by_value, reason = "the engine keeps it; each attempt needs a copy")]
    pub fn new(config: Config) -> Result<Self> {
        config.validate()?;
        let mut probe = Probe::run();
        loop {
            let (kind, reason) = probe.choose(config.backend)?;
            let refusal = Arc::new(OnceLock::new());
            let opening = Arc::clone(&refusal);
            let factory: BackendFactory =
                Arc::new(move |setup| backend::open(kind, setup).inspect_err(|error| drop(opening.set(error.clone()))));
            match Self::start(config.clone(), probe.clone(), reason, &factory) {
                Ok(engine) => return Ok(engine.with_inline()),
                // The probe's queue is short: the kernel may have had room for that one only.
                Err(error) => match refusal.get() {
                    Some(refusal) if config.backend == BackendChoice::Auto => probe.reject(kind, refusal)?,
                    _ => return Err(error),
                },
            }
        }
    }

    fn with_inline(mut self) -> Self {
        self.inline = Some(InlineExecutor::new(&self.stats[0], &self.config, &self.gpus, &self.recorder));
        self
    }

    /// Starts the workers with backends made by the caller.
    ///
    /// # Errors
    /// `InvalidInput` if a setting is out of range, and the errors of the factory and of starting threads.
    #[expect(clippy::needless_pass_by_value, reason = "every worker's thread keeps it")]
    pub fn with_backends(config: Config, factory: BackendFactory) -> Result<Self> {
        config.validate()?;
        Self::start(config, Probe::run(), "made by the caller".into(), &factory)
    }

    fn start(config: Config, probe: Probe, backend_reason: String, factory: &BackendFactory) -> Result<Self> {
        let recorder = Arc::new(Recorder::new());
        let queue = Arc::new(RequestQueue::new(config.workers, &recorder));
        let gpus = Arc::new(EngineGpus::new(Arc::default(), Tracer::new(&recorder, None)));
        let stats: Vec<_> = (0..config.workers).map(|_| Arc::new(WorkerStats::new())).collect();
        let gds = Arc::new(Gds::new(gpus.cuda_devices()));
        let planner = RequestPlanner {
            config: config.clone(),
            queue: Arc::clone(&queue),
            gpus: Arc::clone(&gpus),
            gds: Arc::clone(&gds),
            stats: Arc::clone(&stats[0]),
        };
        let mut engine = Self {
            backend: BackendKind::Threads,
            probe,
            backend_reason,
            stats,
            threads: Arc::new(EngineThreads::new(&queue)),
            drops_in_background: false,
            inline: None,
            gds,
            planner,
            gpus,
            queue,
            config,
            recorder,
        };
        for worker_index in 0..engine.config.workers {
            let Self { config, stats, gpus, gds, recorder, .. } = &engine;
            let parts = WorkerParts { config, stats, gpus, gds, recorder };
            engine.backend = engine.threads.start_worker(worker_index, &parts, Arc::clone(factory))?;
        }
        Ok(engine)
    }

    /// Makes dropping this engine return immediately. A separate thread finishes the submitted requests, unless no
    /// thread can be started. Use it if the engine may be dropped where waiting is not allowed.
    #[must_use]
    pub fn dropped_in_background(mut self) -> Self {
        self.drops_in_background = true;
        self
    }

    /// Finishes the submitted requests and ends the engine's threads. Nothing is in flight when this returns. Requests
    /// that wait for a GPU stream get up to 30 s. Until then, new requests are accepted, unless they would have to wait
    /// as well; later ones fail with `Closed`. Does nothing in a forked child.
    pub fn close(&self) {
        if !self.queue.is_forked() {
            self.threads.end();
        }
    }

    /// Returns the settings.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the features of this machine, probed when the engine was created.
    #[must_use]
    pub fn probe(&self) -> &Probe {
        &self.probe
    }

    /// Returns the backend that moves the bytes.
    #[must_use]
    pub fn backend_kind(&self) -> BackendKind {
        self.backend
    }

    /// Returns the reason for the choice of backend.
    #[must_use]
    pub fn backend_reason(&self) -> &str {
        &self.backend_reason
    }

    /// Returns access to GPU memory for callers that wait for the copy.
    #[must_use]
    pub fn gpu_access(&self) -> GpuAccess {
        GpuAccess::new(&self.gpus)
    }

    /// Returns the counters for bytes that loads compare with checksums.
    #[must_use]
    pub fn comparisons(&self) -> Comparisons {
        Comparisons(Arc::clone(&self.stats[0]))
    }

    /// Returns the engine's counters so far.
    #[must_use]
    pub fn stats(&self) -> StatsSnapshot {
        let mut sum = stats::snapshot(self.backend, self.stats.iter().map(|worker| &**worker));
        (sum.requests, sum.requests_failed) = self.queue.ended();
        sum.set_gds(&self.gds.counts());
        sum
    }

    /// Registers GPU memory with cuFile, if cuFile is available. Transfers from and to this memory then need no cuFile
    /// buffer on the GPU. Registration pays off for memory that is used many times. All registrations of a process
    /// share [`REGISTERED_BYTES_MAX`](crate::backend::gds::REGISTERED_BYTES_MAX) per GPU. When that is full, a new
    /// registration evicts the least recently used ones.
    ///
    /// # Errors
    /// `InvalidInput` if the memory is on the host, not contiguous or empty. `Unsupported` and `Device` if there is no
    /// such GPU. `Closed` in a forked child. A refusal by cuFile is not an error; see [`GpuRegistration::refusal`].
    pub fn register_gpu_memory(&self, memory: Region) -> Result<GpuRegistration> {
        self.check_process()?;
        self.gds.register_memory(memory)
    }

    /// Returns the latency histogram of all blocks, from submission to completion. Each entry has a latency in
    /// microseconds, rounded up to two significant digits, and the number of blocks, in ascending order. The counts
    /// only grow, so the difference of two calls is also a histogram.
    #[must_use]
    pub fn latencies_us(&self) -> Vec<(u64, u64)> {
        stats::latencies_us(self.stats.iter().map(|worker| &**worker))
    }

    /// Starts a recording of the engine's work. Several recordings may run at once; see [`trace`](crate::trace).
    ///
    /// # Errors
    /// `Closed` in a forked child.
    pub fn record(&self) -> Result<Recording> {
        self.check_process()?;
        Ok(Recording::begin(&self.recorder))
    }

    /// Adds a lane of this name to the engine's recordings, for work outside the engine.
    #[must_use]
    pub fn lane(&self, name: &str) -> Lane {
        Lane::new(&self.recorder, name)
    }

    /// Reads `target.len()` bytes at `offset`. Returns immediately, whatever the size.
    ///
    /// # Errors
    /// `InvalidInput` if the range ends at 2^63 or beyond, or the file's alignment does not fit the block size.
    /// `Unsupported` and `Device` if the GPU memory is not usable, or cuFile is required and not available. `Busy` if
    /// too many requests are queued. `Closed` after [`close`](Self::close) and in a forked child. Failures of the
    /// transfer itself are its result.
    pub fn read(&self, file: &Arc<TensorFile>, offset: u64, target: RegionMut) -> Result<Transfer<RegionMut>> {
        Ok(self.try_read(file, offset, target)?)
    }

    /// Reads as [`read`](Self::read), but returns the memory if the request is refused.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn try_read(
        &self,
        file: &Arc<TensorFile>,
        offset: u64,
        target: RegionMut,
    ) -> Result<Transfer<RegionMut>, Refused<RegionMut>> {
        let item = ReadItem { file: Arc::clone(file), offset, target };
        self.try_submit_read(vec![item], Priority::Normal)
    }

    /// Reads ahead: as [`read`](Self::read), but with lower priority. The read is served once the blocks of all other
    /// requests are in flight, or when [`Transfer::prioritise`] is called.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_ahead(&self, file: &Arc<TensorFile>, offset: u64, target: RegionMut) -> Result<Transfer<RegionMut>> {
        let item = ReadItem { file: Arc::clone(file), offset, target };
        Ok(self.try_submit_read(vec![item], Priority::ReadAhead)?)
    }

    /// Reads ahead: as [`read_batch`](Self::read_batch), but with lower priority. The batch is served once the blocks
    /// of all other requests are in flight, or when [`Transfer::prioritise`] is called.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_batch_ahead(&self, items: Vec<ReadItem>) -> Result<Transfer<Vec<RegionMut>>> {
        Ok(self.try_submit_read(items, Priority::ReadAhead)?)
    }

    /// Reads as [`read_batch`](Self::read_batch), or as [`read_batch_ahead`](Self::read_batch_ahead) if it is not
    /// urgent, but returns the memory if the request is refused.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn try_read_batch(
        &self,
        items: Vec<ReadItem>,
        is_urgent: bool,
    ) -> Result<Transfer<Vec<RegionMut>>, Refused<Vec<RegionMut>>> {
        self.try_submit_read(items, if is_urgent { Priority::Normal } else { Priority::ReadAhead })
    }

    /// Reads as [`read`](Self::read), for a caller that waits immediately. A small request runs on the calling thread
    /// and is done on return, which saves two thread switches. Only engines of [`new`](Self::new) with the backend
    /// `Auto` or `Threads` do so.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_now(&self, file: &Arc<TensorFile>, offset: u64, target: RegionMut) -> Result<Transfer<RegionMut>> {
        let item = ReadItem { file: Arc::clone(file), offset, target };
        let request = self.planner.read(vec![item]).map_err(|(error, _)| error)?;
        self.submit_now(request)
    }

    /// Reads many ranges as one request. Adjacent ranges become large ops.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_batch(&self, items: Vec<ReadItem>) -> Result<Transfer<Vec<RegionMut>>> {
        Ok(self.try_submit_read(items, Priority::Normal)?)
    }

    /// Writes `source` at `offset`. Returns immediately, whatever the size.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn write(
        &self,
        file: &Arc<TensorFile>,
        offset: u64,
        source: Region,
        options: WriteOptions,
    ) -> Result<Transfer<Region>> {
        let item = WriteItem { file: Arc::clone(file), offset, source };
        self.submit(self.planner.write(vec![item], options)?)
    }

    /// Writes as [`write`](Self::write), for a caller that waits immediately; see [`read_now`](Self::read_now).
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn write_now(
        &self,
        file: &Arc<TensorFile>,
        offset: u64,
        source: Region,
        options: WriteOptions,
    ) -> Result<Transfer<Region>> {
        let item = WriteItem { file: Arc::clone(file), offset, source };
        self.submit_now(self.planner.write(vec![item], options)?)
    }

    /// Writes many ranges as one request. Adjacent ranges become large ops.
    ///
    /// # Errors
    /// As [`read`](Self::read), and `InvalidInput` if two ranges overlap.
    pub fn write_batch(&self, items: Vec<WriteItem>, options: WriteOptions) -> Result<Transfer<Vec<Region>>> {
        self.submit(self.planner.write(items, options)?)
    }

    /// Waits until the writes to the file that have ended have this durability. Does nothing for `None`.
    ///
    /// # Errors
    /// As [`read`](Self::read), and the errors that the sync reports for earlier writes.
    pub fn sync(&self, file: &Arc<TensorFile>, durability: Durability) -> Result<()> {
        if durability == Durability::None {
            return Ok(());
        }
        // An empty write consists of its sync only.
        let options = WriteOptions { durability, mode: WriteMode::InPlace };
        self.write(file, 0, Region::from_vec(Vec::new()), options)?.wait().1?;
        Ok(())
    }

    fn try_submit_read<T: TransferMemory>(
        &self,
        items: Vec<ReadItem>,
        priority: Priority,
    ) -> Result<Transfer<T>, Refused<T>> {
        let refused = |(error, memory)| Refused { error, memory: T::from_memory(OpaqueMemory::of(memory)) };
        let request = self.planner.read(items).map_err(refused)?;
        let submitted = self.submit_with(Arc::clone(&request), priority);
        submitted.map_err(|error| Refused { error, memory: take_memory(&request) })
    }

    /// Refuses calls in a process that was forked from the engine's process.
    ///
    /// # Errors
    /// `Closed`.
    pub fn check_process(&self) -> Result<()> {
        self.queue.check_process()
    }

    /// Offers the request to the workers.
    fn submit<T>(&self, request: Arc<Request>) -> Result<Transfer<T>> {
        self.submit_with(request, Priority::Normal)
    }

    fn submit_with<T>(&self, request: Arc<Request>, priority: Priority) -> Result<Transfer<T>> {
        if request.plan.block_count() == 0 && !request.needs_preparing() {
            self.queue.push_empty(&request)?;
        } else if !request.is_ready()? {
            WorkerStats::count(&self.stats[0].counters.gpu_waits, 1);
            self.threads.wait_list.hold(&request, priority)?;
        } else {
            self.queue.push(&request, priority)?;
        }
        Ok(Transfer::new(request, Arc::clone(&self.queue)))
    }

    /// Runs a small request on this thread, and offers any other to the workers.
    fn submit_now<T>(&self, request: Arc<Request>) -> Result<Transfer<T>> {
        if let Some(inline) = &self.inline
            && inline.try_run(&request, &self.queue)?
        {
            return Ok(Transfer::new(request, Arc::clone(&self.queue)));
        }
        self.submit(request)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.queue.is_forked() {
            // The threads exist in the parent only, and their locks may stay held forever.
            return;
        }
        if self.drops_in_background {
            let threads = Arc::clone(&self.threads);
            let thread = thread::Builder::new().name("deepnvme-release".into());
            if start_thread(|| thread.spawn(move || threads.end())).is_ok() {
                return;
            }
        }
        self.threads.end();
    }
}

/// The refusal of a request, with its memory.
#[derive(Debug)]
pub struct Refused<T> {
    /// The reason.
    pub error: Error,
    /// The memory of the request. `None` if an error lost it.
    pub memory: Option<T>,
}

impl<T> From<Refused<T>> for Error {
    fn from(refused: Refused<T>) -> Self {
        refused.error
    }
}
