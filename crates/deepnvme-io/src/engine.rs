//! The engine: owns the workers, accepts requests and sums statistics.

use std::sync::Arc;

use deepnvme_mem::{Device, Region, RegionMut, StreamHandle};

use crate::backend::gds::{Gds, GdsBackend, GpuPin};
use crate::backend::{self, Backend, BackendKind, BackendSetup};
use crate::config::{Config, DirectMode};
use crate::error::{Error, ErrorKind, Result};
use crate::file::{DirectState, TensorFile};
use crate::gpu::{EngineGpus, GpuAccess, GpuEvent, StreamBarrier};
use crate::probe::Probe;
use crate::request::{
    Durability, OpaqueMemory, Priority, Request, RequestMemory, RequestQueue, Transfer, TransferMemory, WriteExtent,
    WriteOptions, take_memory,
};
use crate::split::{BlockSizes, Direction, Plan, Segment};
use crate::start::start_thread;
use crate::stats::{self, Comparisons, StatsSnapshot, WorkerStats};
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Mutex, lock, mpsc};
use crate::trace::{Lane, Recorder, Recording, Tape};
use crate::worker::{GdsSetup, Hands, SlotSetup, Worker, WorkerSetup, gds_required};

/// Minimum bytes of a target to request huge pages for. For smaller tensors, the advice would only split the process's
/// memory map into more pieces.
const HUGE_ADVICE_BYTES_MIN: usize = 8 << 20;

/// Creates the backend of one worker, on that worker's thread.
pub type BackendFactory = Arc<dyn Fn(&BackendSetup) -> Result<Box<dyn Backend>> + Send + Sync>;

/// One tensor to read.
#[derive(Debug)]
pub struct ReadItem {
    /// The file to read.
    pub file: Arc<TensorFile>,
    /// The file offset, in bytes.
    pub offset: u64,
    /// The memory to fill. Its length is the number of bytes to read.
    pub target: RegionMut,
}

/// One tensor to write.
#[derive(Debug)]
pub struct WriteItem {
    /// The file to write.
    pub file: Arc<TensorFile>,
    /// The file offset, in bytes.
    pub offset: u64,
    /// The memory to write. Its length is the number of bytes to write.
    pub source: Region,
}

/// Moves bytes between files and memory. Threads may share it. Dropping it waits for the submitted requests.
#[derive(Debug)]
pub struct Engine {
    config: Config,
    probe: Probe,
    backend: BackendKind,
    backend_reason: String,
    queue: Arc<RequestQueue>,
    stats: Vec<Arc<WorkerStats>>,
    crew: Arc<Crew>,
    drops_in_background: bool,
    /// `None` if the caller made the backends.
    hands: Option<Hands>,
    gpus: Arc<EngineGpus>,
    gds: Arc<Gds>,
    recorder: Arc<Recorder>,
}

/// The threads of an engine, and the state that ends them. Shared with the thread that waits for their end.
#[derive(Debug)]
struct Crew {
    queue: Arc<RequestQueue>,
    barrier: StreamBarrier,
    workers: Mutex<Vec<JoinHandle<()>>>,
}

impl Crew {
    /// Waits until all requests and threads have ended. Concurrent calls wait equally long.
    fn end(&self) {
        self.barrier.close();
        self.queue.close();
        let mut workers = lock(&self.workers);
        for worker in workers.drain(..) {
            // The panic of a worker is on stderr already, and no caller is left to report it to.
            let _ = worker.join();
        }
    }
}

impl Engine {
    /// Starts the workers with the backend that the settings choose.
    ///
    /// # Errors
    /// `InvalidInput` if a setting is out of range. `Unsupported` if the requested backend does not work here.
    pub fn new(config: Config) -> Result<Self> {
        config.validate()?;
        let probe = Probe::run();
        let (kind, reason) = probe.choose(config.backend)?;
        let factory: BackendFactory = Arc::new(move |setup| backend::open(kind, setup));
        let mut engine = Self::start(config, probe, reason, &factory)?;
        engine.hands = Some(Hands::new(&engine.stats[0], &engine.config, &engine.gpus, &engine.recorder));
        Ok(engine)
    }

    /// Starts the workers with backends made by the caller.
    ///
    /// # Errors
    /// `InvalidInput` if a setting is out of range, and the errors of the factory.
    #[expect(clippy::needless_pass_by_value, reason = "every worker's thread keeps it")]
    pub fn with_backends(config: Config, factory: BackendFactory) -> Result<Self> {
        config.validate()?;
        Self::start(config, Probe::run(), "made by the caller".into(), &factory)
    }

    fn start(config: Config, probe: Probe, backend_reason: String, factory: &BackendFactory) -> Result<Self> {
        let recorder = Arc::new(Recorder::new());
        let queue = Arc::new(RequestQueue::new(config.workers, &recorder));
        let gpus = Arc::new(EngineGpus::new(Arc::default(), Tape::new(&recorder, None)));
        let stats: Vec<_> = (0..config.workers).map(|_| Arc::new(WorkerStats::new())).collect();
        let mut engine = Self {
            backend: BackendKind::Threads,
            probe,
            backend_reason,
            stats,
            crew: Arc::new(Crew {
                barrier: StreamBarrier::new(&queue),
                queue: Arc::clone(&queue),
                workers: Mutex::default(),
            }),
            drops_in_background: false,
            hands: None,
            gds: Arc::new(Gds::new(gpus.cuda_devices())),
            gpus,
            queue,
            config,
            recorder,
        };
        for worker_index in 0..engine.config.workers {
            engine.backend = engine.start_worker(worker_index, Arc::clone(factory))?;
        }
        Ok(engine)
    }

    /// Starts one worker and waits until its backend is open.
    fn start_worker(&mut self, worker_index: u32, factory: BackendFactory) -> Result<BackendKind> {
        let config = &self.config;
        let setup = WorkerSetup {
            queue: Arc::clone(&self.queue),
            stats: Arc::clone(&self.stats[worker_index as usize]),
            worker_index,
            gpus: Arc::clone(&self.gpus),
            gds: GdsSetup { gds: Arc::clone(&self.gds), mode: config.gds },
            tape: Tape::new(&self.recorder, Some(worker_index)),
            slots: SlotSetup {
                slot_bytes: config.slot_bytes() as usize,
                slots: config.slots_per_worker() as usize,
                lock_pool: config.lock_pool,
                register: config.register_pool,
            },
            window: config.window,
        };
        let backend_setup = BackendSetup { queue_depth: config.queue_depth, submit: config.submit, worker_index };
        let gds = (config.gds != DirectMode::Disabled).then(|| Arc::clone(&self.gds));
        let (report, opened) = mpsc::sync_channel(1);
        let run = move || {
            let backend = match factory(&backend_setup) {
                Ok(backend) => backend,
                Err(error) => return drop(report.send(Err(error))),
            };
            let backend = match gds {
                Some(gds) => Box::new(GdsBackend::new(backend, &backend_setup, &gds)),
                None => backend,
            };
            let kind = backend.kind();
            let worker = Worker::new(&setup, backend);
            drop(report.send(Ok(kind)));
            // A panic drops the worker's items, which fails their requests. The end of the thread is reported here.
            let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| worker.run()));
            let panicked = || Err(Error::new(ErrorKind::Io, "engine", "a worker panicked; report this as a bug"));
            if let Err(error) = ran.unwrap_or_else(|_| panicked()) {
                tracing::error!(worker_index, %error, "a worker ended early");
                setup.queue.worker_failed(&error);
            }
        };
        let thread = start_thread(|| thread::Builder::new().name(format!("deepnvme-{worker_index}")).spawn(run))?;
        lock(&self.crew.workers).push(thread);
        let died = || Error::new(ErrorKind::Io, "engine", "a worker thread ended before its backend was open");
        opened.recv().map_err(|_| died())?
    }

    /// Makes dropping this engine return immediately. A separate thread finishes the submitted requests. Use it if the
    /// engine may be dropped where waiting is not allowed.
    #[must_use]
    pub fn dropped_in_background(mut self) -> Self {
        self.drops_in_background = true;
        self
    }

    /// Finishes the submitted requests and ends the engine's threads. Nothing is in flight when it returns. Concurrent
    /// submissions fail with `Closed` from now on. Does nothing in a forked child.
    pub fn close(&self) {
        if !self.queue.is_forked() {
            self.crew.end();
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

    /// Registers GPU memory with cuFile, if cuFile has the direct path. Transfers from and to this memory then need no
    /// cuFile buffer on the GPU. Registration pays off for memory that is used many times. All pins of a process share
    /// [`PINNED_BYTES_MAX`](crate::backend::gds::PINNED_BYTES_MAX) per GPU. When that is full, a new pin
    /// evicts the least recently used ones.
    ///
    /// # Errors
    /// `InvalidInput` if the memory is on the host or not contiguous. `Unsupported` and `Device` if there is no such
    /// GPU. A refusal by cuFile is not an error; see [`GpuPin::refusal`].
    pub fn pin_gpu_memory(&self, memory: Region) -> Result<GpuPin> {
        self.check_process()?;
        self.gds.pin(memory)
    }

    /// Returns the latency histogram of all blocks, from submission to completion: microseconds, rounded to two digits,
    /// and the number of blocks, in ascending order. The counts only grow, so the difference of two calls is also a
    /// histogram.
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
    /// `InvalidInput` if the range ends beyond 2^63. `Unsupported` and `Device` if the GPU memory is not usable.
    /// `Closed` in a forked child.
    pub fn read(&self, file: &Arc<TensorFile>, offset: u64, target: RegionMut) -> Result<Transfer<RegionMut>> {
        Ok(self.offer_read(file, offset, target)?)
    }

    /// Reads as [`read`](Self::read), but returns the memory if the request is refused.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn offer_read(
        &self,
        file: &Arc<TensorFile>,
        offset: u64,
        target: RegionMut,
    ) -> Result<Transfer<RegionMut>, Refused<RegionMut>> {
        let item = ReadItem { file: Arc::clone(file), offset, target };
        self.offer(vec![item], Priority::Normal)
    }

    /// Reads ahead: as [`read`](Self::read), but with lower priority. The read is served once the blocks of all other
    /// requests are in flight, or when [`Transfer::prioritize`] is called.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_later(&self, file: &Arc<TensorFile>, offset: u64, target: RegionMut) -> Result<Transfer<RegionMut>> {
        let item = ReadItem { file: Arc::clone(file), offset, target };
        Ok(self.offer(vec![item], Priority::ReadAhead)?)
    }

    /// Reads ahead: as [`read_batch`](Self::read_batch), but with lower priority. The batch is served once the blocks
    /// of all other requests are in flight, or when [`Transfer::prioritize`] is called.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_batch_later(&self, items: Vec<ReadItem>) -> Result<Transfer<Vec<RegionMut>>> {
        Ok(self.offer(items, Priority::ReadAhead)?)
    }

    /// Reads as [`read_batch`](Self::read_batch), or as [`read_batch_later`](Self::read_batch_later) if it is not
    /// urgent, but returns the memory if the request is refused.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn offer_read_batch(
        &self,
        items: Vec<ReadItem>,
        is_urgent: bool,
    ) -> Result<Transfer<Vec<RegionMut>>, Refused<Vec<RegionMut>>> {
        self.offer(items, if is_urgent { Priority::Normal } else { Priority::ReadAhead })
    }

    /// Reads as [`read`](Self::read), for a caller that waits immediately. A small request runs on the calling thread
    /// and is done on return, which saves two thread switches. Only the backends `Auto` and `Threads` do so.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_now(&self, file: &Arc<TensorFile>, offset: u64, target: RegionMut) -> Result<Transfer<RegionMut>> {
        let item = ReadItem { file: Arc::clone(file), offset, target };
        let request = self.read_request(vec![item]).map_err(|(error, _)| error)?;
        self.submit_now(request)
    }

    /// Reads many ranges as one request. Adjacent ranges become large transfers.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_batch(&self, items: Vec<ReadItem>) -> Result<Transfer<Vec<RegionMut>>> {
        Ok(self.offer(items, Priority::Normal)?)
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
        self.submit(self.write_request(vec![item], options)?)
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
        self.submit_now(self.write_request(vec![item], options)?)
    }

    /// Writes many ranges as one request. Adjacent ranges become large transfers.
    ///
    /// # Errors
    /// As [`read`](Self::read), and `InvalidInput` if two ranges overlap.
    pub fn write_batch(&self, items: Vec<WriteItem>, options: WriteOptions) -> Result<Transfer<Vec<Region>>> {
        self.submit(self.write_request(items, options)?)
    }

    /// Waits until earlier writes to the file have this durability. Does nothing for `None`.
    ///
    /// # Errors
    /// As [`read`](Self::read), and the errors that the sync reports for earlier writes.
    pub fn sync(&self, file: &Arc<TensorFile>, durability: Durability) -> Result<()> {
        if durability == Durability::None {
            return Ok(());
        }
        // An empty write consists of its sync only.
        let options = WriteOptions { durability, extent: WriteExtent::InPlace };
        self.write(file, 0, Region::from_vec(Vec::new()), options)?.wait().1?;
        Ok(())
    }

    fn offer<T: TransferMemory>(&self, items: Vec<ReadItem>, priority: Priority) -> Result<Transfer<T>, Refused<T>> {
        let refused = |(error, memory)| Refused { error, memory: T::from_memory(OpaqueMemory::of(memory)) };
        let request = self.read_request(items).map_err(refused)?;
        let submitted = self.submit_for(Arc::clone(&request), priority);
        submitted.map_err(|error| Refused { error, memory: take_memory(&request) })
    }

    /// Returns the memory with an error.
    fn read_request(&self, items: Vec<ReadItem>) -> Result<Arc<Request>, (Error, RequestMemory)> {
        let mut layout = RequestLayout::default();
        let mut targets = Vec::with_capacity(items.len());
        for ReadItem { file, offset, target } in items {
            let place = layout.place(target.device(), target.stream(), target.is_contiguous().then(|| target.addr()));
            if target.len() >= HUGE_ADVICE_BYTES_MIN {
                target.advise_huge();
            }
            layout.add(file, offset, target.len(), place);
            targets.push(target);
        }
        let memory = RequestMemory::Targets(targets);
        match self.planned(Direction::Read, layout) {
            Ok(planned) => Ok(planned.request(memory, WriteOptions::default())),
            Err(error) => Err((error, memory)),
        }
    }

    fn write_request(&self, items: Vec<WriteItem>, options: WriteOptions) -> Result<Arc<Request>> {
        let mut layout = RequestLayout::default();
        let mut sources = Vec::with_capacity(items.len());
        for WriteItem { file, offset, source } in items {
            let place = layout.place(source.device(), source.stream(), source.is_contiguous().then(|| source.addr()));
            layout.add(file, offset, source.len(), place);
            sources.push(source);
        }
        Ok(self.planned(Direction::Write, layout)?.request(RequestMemory::Sources(sources), options))
    }

    /// Refuses calls in a process that was forked from the engine's.
    ///
    /// # Errors
    /// `Closed`.
    pub fn check_process(&self) -> Result<()> {
        if self.queue.is_forked() { Err(Error::forked()) } else { Ok(()) }
    }

    fn planned(&self, direction: Direction, layout: RequestLayout) -> Result<Planned> {
        self.check_process()?;
        let RequestLayout { files, file_ends, segments, streams, .. } = layout;
        self.note_buffered(&files);
        let mut geometries: Vec<_> = files.iter().map(|file| file.geometry()).collect();
        let name_file = |error: Error| match files.first() {
            Some(file) => error.at_path(file.path()),
            None => error,
        };
        let (block_bytes, slot_bytes) = (self.config.block_bytes, self.config.slot_bytes());
        let mut sizes = BlockSizes { block_bytes, slot_bytes, gds_bytes: block_bytes };
        if !streams.is_empty() && self.has_gds(&files).map_err(name_file)? {
            sizes.gds_bytes = self.gds.block_bytes(block_bytes);
            geometries.iter_mut().for_each(|geometry| geometry.has_gds = true);
        }
        let plan = Plan::new(direction, &geometries, segments, sizes).map_err(name_file)?;
        let starts_after = self.gpus.record_events(&streams).map_err(name_file)?;
        let span = tracing::debug_span!(
            "request",
            verb = direction.name(),
            path = files.first().map(|file| tracing::field::display(file.path().display())),
            files = files.len(),
            bytes = plan.bytes_total(),
            blocks = plan.block_count(),
        );
        let has_gpu_memory = !streams.is_empty();
        Ok(Planned { plan, files, file_ends, has_gpu_memory, starts_after, span })
    }

    /// Offers the request to the workers.
    fn submit<T>(&self, request: Arc<Request>) -> Result<Transfer<T>> {
        self.submit_for(request, Priority::Normal)
    }

    fn submit_for<T>(&self, request: Arc<Request>, priority: Priority) -> Result<Transfer<T>> {
        if request.plan.block_count() == 0 && !request.needs_preparing() {
            self.queue.push_empty(&request)?;
        } else if !request.is_ready()? {
            WorkerStats::count(&self.stats[0].counters.gpu_waits, 1);
            self.crew.barrier.hold(&request, priority)?;
        } else {
            self.queue.push(&request, priority)?;
        }
        Ok(Transfer::new(request, Arc::clone(&self.queue)))
    }

    /// Runs a small request on this thread, and offers any other to the workers.
    fn submit_now<T>(&self, request: Arc<Request>) -> Result<Transfer<T>> {
        if let Some(hands) = &self.hands
            && hands.make(&request, &self.queue)?
        {
            return Ok(Transfer::new(request, Arc::clone(&self.queue)));
        }
        self.submit(request)
    }
}

impl Engine {
    /// Returns whether cuFile may serve some of these files. Fails if cuFile is required and cannot serve all of them.
    fn has_gds(&self, files: &[Arc<TensorFile>]) -> Result<bool> {
        if self.config.gds == DirectMode::Disabled {
            return Ok(false);
        }
        let cufile = self.gds.cufile();
        let buffered = || {
            files.iter().find_map(|file| match file.direct() {
                DirectState::Direct { .. } => None,
                DirectState::Buffered { reason } => Some(format!("the file has no direct I/O ({reason})")),
            })
        };
        match cufile.err().map(str::to_owned).or_else(buffered) {
            None => {}
            Some(reason) if self.config.gds == DirectMode::Required => return Err(gds_required(&reason)),
            Some(reason) => {
                lock(&self.stats[0].gds_reason).get_or_insert(reason);
            }
        }
        Ok(cufile.is_ok())
    }

    /// Keeps the first reason why a file has no direct I/O, for `stats`: no fallback is silent.
    fn note_buffered(&self, files: &[Arc<TensorFile>]) {
        if self.config.direct == DirectMode::Disabled {
            return;
        }
        let mut noted = lock(&self.stats[0].buffered_reason);
        if noted.is_none() {
            *noted = files.iter().find_map(|file| match file.direct() {
                DirectState::Direct { .. } => None,
                DirectState::Buffered { reason } => Some(reason),
            });
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.queue.is_forked() {
            // The threads exist in the parent only, and their locks may stay held forever.
            return;
        }
        if self.drops_in_background {
            let crew = Arc::clone(&self.crew);
            let thread = thread::Builder::new().name("deepnvme-release".into());
            if start_thread(|| thread.spawn(move || crew.end())).is_ok() {
                return;
            }
        }
        self.crew.end();
    }
}

/// A refused request, and its memory.
#[derive(Debug)]
pub struct Refused<T> {
    /// The reason.
    pub error: Error,
    /// The memory of the request.
    pub memory: Option<T>,
}

impl<T> From<Refused<T>> for Error {
    fn from(refused: Refused<T>) -> Self {
        refused.error
    }
}

/// A request without its memory.
struct Planned {
    plan: Plan,
    files: Vec<Arc<TensorFile>>,
    file_ends: Vec<u64>,
    has_gpu_memory: bool,
    starts_after: Vec<Box<dyn GpuEvent>>,
    span: tracing::Span,
}

impl Planned {
    fn request(self, memory: RequestMemory, options: WriteOptions) -> Arc<Request> {
        let Self { plan, files, file_ends, has_gpu_memory, starts_after, span } = self;
        Arc::new(Request::new(plan, (files, file_ends), (memory, has_gpu_memory), starts_after, options, span))
    }
}

/// The files and segments of a request, while they are collected.
#[derive(Default)]
struct RequestLayout {
    files: Vec<Arc<TensorFile>>,
    file_ends: Vec<u64>,
    known: std::collections::HashMap<usize, u32>,
    segments: Vec<Segment>,
    /// The GPU streams that the memory belongs to.
    streams: Vec<(Device, StreamHandle)>,
}

impl RequestLayout {
    /// Returns the address for the kernel if the memory is on the host, and whether it is contiguous on a GPU.
    fn place(&mut self, device: Device, stream: StreamHandle, address: Option<usize>) -> (Option<usize>, bool) {
        if device == Device::Host {
            return (address, false);
        }
        if !self.streams.contains(&(device, stream)) {
            self.streams.push((device, stream));
        }
        (None, address.is_some())
    }

    fn add(&mut self, file: Arc<TensorFile>, offset: u64, len: usize, (address, is_flat_gpu): (Option<usize>, bool)) {
        let identity = Arc::as_ptr(&file) as usize;
        let file = *self.known.entry(identity).or_insert_with(|| {
            self.files.push(file);
            self.file_ends.push(0);
            self.files.len() as u32 - 1
        });
        let end = &mut self.file_ends[file as usize];
        *end = (*end).max(offset.saturating_add(len as u64));
        let item = self.segments.len() as u32;
        self.segments.push(Segment { file, item, offset, len: len as u64, address, is_flat_gpu });
    }
}
