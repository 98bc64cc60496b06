//! A thread pool that reads and decodes weights; threads that wait for weights help.
//!
//! The pool has a bounded number of buffers, and each of them is being read into or decoded while there is work. So the
//! disk waits for a CPU only if all buffers are full. Half of the CPU cores, but at most [`THREADS_MAX`], decode; the
//! others compute, and decode only while they wait. Weights with an entry in the compressed-weight cache are read once,
//! and decoded from there afterwards.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use deepnvme_file::aligned_range::AlignedRead;
use deepnvme_io::mem::{Buffer, CreatorProcess, Device, PAGE_BYTES, ParentOnly, RegionMut};
use deepnvme_io::{Engine, GpuAccess, TensorFile};

use crate::compressed_cache::CompressedCache;
use crate::decode::{Workspace, convert};
use crate::decode_task::{DecodeTask, JobCost};
use crate::error::{Error, Result};
use crate::layer_group::Conversion;
use crate::sync::{Condvar, Instant, JoinHandle, Mutex, MutexGuard, thread};
use deepnvme_io::start_thread;

/// More threads than this would wait for the disk.
const THREADS_MAX: usize = 8;
/// Bytes of buffers for each thread and for the waiting one: a disk needs some MiB in flight for full bandwidth.
const BUFFERS_BYTES: usize = 16 << 20;

/// How often a thread that waits for another task's buffer checks whether its own task can go on.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// One conversion, with its target memory.
#[derive(Debug)]
pub(crate) struct DecodeJob {
    pub(crate) file: Arc<TensorFile>,
    pub(crate) conversion: Conversion,
    pub(crate) target: RegionMut,
    /// Its entry in the compressed-weight cache.
    pub(crate) entry: Option<usize>,
}

/// A job whose bytes are being read, or are in memory.
#[derive(Debug)]
struct StartedJob {
    task: Arc<DecodeTask>,
    job: DecodeJob,
    bytes: JobBytes,
    /// The owner of the buffer.
    owner: Owner,
}

#[derive(Debug)]
enum JobBytes {
    InFlight(AlignedRead),
    Ready(Buffer),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Owner {
    Pool,
    /// The cache, and the index of the entry.
    Cache(usize),
}

#[derive(Debug, Default)]
struct Jobs {
    /// Jobs without a buffer.
    waiting: VecDeque<(Arc<DecodeTask>, DecodeJob)>,
    started: VecDeque<StartedJob>,
    spare: Vec<Buffer>,
    /// Buffers that may still be allocated.
    unallocated: usize,
    cache: CompressedCache,
    is_shut_down: bool,
}

#[derive(Debug)]
struct Shared {
    engine: Arc<Engine>,
    buffers: usize,
    buffer_bytes: usize,
    jobs: Mutex<Jobs>,
    /// Signals that a read started, a job ended, or the pool shuts down.
    changed: Condvar,
    /// The scratch of threads that help, between calls.
    idle_scratch: Mutex<Vec<ThreadScratch>>,
}

/// The threads and their shared state.
#[derive(Debug)]
pub(crate) struct DecodePool {
    shared: Arc<Shared>,
    threads: Vec<ParentOnly<JoinHandle<()>>>,
    creator: CreatorProcess,
}

/// The number of pool threads: half of the CPU cores at most, since the others compute.
fn threads() -> usize {
    let cores = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    (cores / 2).clamp(1, THREADS_MAX)
}

/// The number of threads that decode while the disk is the bottleneck: the pool, and the waiting one.
pub(crate) fn decoding_threads() -> usize {
    let cores = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    (threads() + 1).min(cores)
}

impl DecodePool {
    /// Starts a pool for conversions of at most this many bytes on disk.
    pub(crate) fn start(engine: &Arc<Engine>, read_bytes_max: usize, cache: CompressedCache) -> Result<Self> {
        Self::start_with(engine, read_bytes_max, cache, threads())
    }

    fn start_with(engine: &Arc<Engine>, read_bytes_max: usize, cache: CompressedCache, wanted: usize) -> Result<Self> {
        // A conversion may begin anywhere in a block.
        let buffer_bytes = read_bytes_max.next_multiple_of(PAGE_BYTES as usize) + PAGE_BYTES as usize;
        let buffers = ((wanted + 1) * BUFFERS_BYTES / buffer_bytes).max(wanted + 1);
        let shared = Arc::new(Shared {
            engine: Arc::clone(engine),
            buffers,
            buffer_bytes,
            jobs: Mutex::new(Jobs { unallocated: buffers, cache, ..Jobs::default() }),
            changed: Condvar::new(),
            idle_scratch: Mutex::default(),
        });
        let mut threads = Vec::new();
        for index in 0..wanted {
            let shared = Arc::clone(&shared);
            let thread = thread::Builder::new().name(format!("deepnvme-decode-{index}"));
            match start_thread(|| thread.spawn(move || shared.work())) {
                Ok(thread) => threads.push(ParentOnly::new(thread)),
                // Fewer threads are enough.
                Err(_) if !threads.is_empty() => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Self { shared, threads, creator: CreatorProcess::current() })
    }

    /// Bytes of all buffers.
    pub(crate) fn buffers_bytes(&self) -> u64 {
        (self.shared.buffers * self.shared.buffer_bytes) as u64
    }

    /// Queues jobs as one task; urgent ones go first.
    pub(crate) fn begin(&self, jobs: Vec<DecodeJob>, is_urgent: bool) -> Arc<DecodeTask> {
        let task = Arc::new(DecodeTask::new(jobs.len()));
        let mut new: VecDeque<_> = jobs.into_iter().map(|job| (Arc::clone(&task), job)).collect();
        let mut all = lock(&self.shared.jobs);
        if is_urgent {
            new.append(&mut all.waiting);
            all.waiting = new;
        } else {
            all.waiting.append(&mut new);
        }
        if !self.is_forked() {
            self.shared.start_reads(&mut all);
        }
        task
    }

    /// Moves a task's jobs to the front, since a thread waits for them.
    pub(crate) fn prioritise(&self, task: &Arc<DecodeTask>) {
        let mut jobs = lock(&self.shared.jobs);
        jobs.waiting.make_contiguous().sort_by_key(|(other, _)| !Arc::ptr_eq(other, task));
        jobs.started.make_contiguous().sort_by_key(|started| !Arc::ptr_eq(&started.task, task));
    }

    /// Decodes until the task is done or `until` is reached. Returns whether the task is done.
    pub(crate) fn help(&self, task: &Arc<DecodeTask>, until: Instant) -> bool {
        let shared = &self.shared;
        let mut scratch = None;
        while !self.is_forked() {
            let left = until.saturating_duration_since(Instant::now());
            let mut jobs = lock(&shared.jobs);
            if task.is_done() || left.is_zero() {
                break;
            }
            let Some(started) = jobs.take(Some(task)) else {
                // Other threads decode the rest. A thread that ends a job takes the lock before it notifies.
                drop(shared.changed.wait_timeout(jobs, left));
                continue;
            };
            drop(jobs);
            let is_own = Arc::ptr_eq(&started.task, task);
            if started.bytes.wait_timeout(if is_own { left } else { left.min(POLL_INTERVAL) }) {
                let scratch = scratch.get_or_insert_with(|| {
                    lock(&shared.idle_scratch).pop().unwrap_or_else(|| ThreadScratch::new(&shared.engine))
                });
                shared.convert(scratch, started);
            } else {
                lock(&shared.jobs).started.push_front(started);
                shared.changed.notify_all();
            }
        }
        lock(&shared.idle_scratch).extend(scratch);
        task.is_done()
    }

    /// Whether this process was forked from the one that started the pool, to which all jobs belong.
    fn is_forked(&self) -> bool {
        !self.creator.is_current()
    }
}

impl Drop for DecodePool {
    fn drop(&mut self) {
        if self.is_forked() {
            return; // the threads belong to the parent process
        }
        {
            let mut jobs = lock(&self.shared.jobs);
            jobs.is_shut_down = true;
            for (task, job) in jobs.waiting.drain(..) {
                task.end(job.target, Err(Error::Closed));
            }
        }
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..).filter_map(ParentOnly::into_inner) {
            let _ = thread.join();
        }
    }
}

impl Jobs {
    /// Returns a buffer to its owner. `None` is a lost buffer: the pool may allocate another one, and the cache does
    /// not use that entry again.
    fn put_back(&mut self, owner: Owner, buffer: Option<Buffer>, is_valid: bool) {
        match (owner, buffer) {
            (Owner::Cache(entry), Some(buffer)) => self.cache.put(entry, buffer, is_valid),
            (Owner::Pool, Some(buffer)) => self.spare.push(buffer),
            (Owner::Pool, None) => self.unallocated += 1,
            (Owner::Cache(_), None) => {}
        }
    }

    /// Takes the next job to decode, preferably of `task` and with its bytes in memory. With a task, another task's job
    /// is taken before its bytes are in memory only if the task needs its buffer.
    fn take(&mut self, task: Option<&Arc<DecodeTask>>) -> Option<StartedJob> {
        let is_wanted = |started: &StartedJob| task.is_none_or(|task| Arc::ptr_eq(&started.task, task));
        let is_ready = |started: &StartedJob| started.bytes.is_ready();
        let place = self.started.iter().position(|started| is_wanted(started) && is_ready(started));
        let place = place.or_else(|| self.started.iter().position(is_ready));
        let place = place.or_else(|| self.started.iter().position(is_wanted));
        // Waiting for another task's read could delay this one, so it happens only for the buffer.
        let needs_buffer = |task: &Arc<DecodeTask>| self.waiting.iter().any(|(other, _)| Arc::ptr_eq(other, task));
        let place = place.or_else(|| task.is_some_and(needs_buffer).then_some(0));
        self.started.remove(place?)
    }
}

impl Shared {
    /// The loop of a pool thread.
    fn work(&self) {
        let mut scratch = ThreadScratch::new(&self.engine);
        loop {
            let mut jobs = lock(&self.jobs);
            let Some(started) = jobs.take(None) else {
                if jobs.is_shut_down {
                    return;
                }
                drop(self.changed.wait(jobs));
                continue;
            };
            drop(jobs);
            self.convert(&mut scratch, started);
        }
    }

    /// Starts reads while there are buffers; a failure ends the job. Called under the lock after each new job and each
    /// returned buffer, so no job waits while a buffer is free.
    fn start_reads(&self, jobs: &mut Jobs) {
        let before = jobs.waiting.len();
        while let Some((task, job)) = jobs.waiting.pop_front() {
            if let Some((entry, buffer)) = job.entry.and_then(|entry| Some((entry, jobs.cache.take_cached(entry)?))) {
                let (bytes, owner) = (JobBytes::Ready(buffer), Owner::Cache(entry));
                jobs.started.push_back(StartedJob { task, job, bytes, owner });
                continue;
            }
            let Some((owner, buffer)) = self.buffer(jobs, job.entry) else {
                jobs.waiting.push_front((task, job));
                break;
            };
            let range = job.conversion.aligned_range();
            let started = buffer
                .map_err(|error| (error, None))
                .and_then(|buffer| AlignedRead::start(&self.engine, &job.file, range, buffer));
            match started {
                Ok(read) => jobs.started.push_back(StartedJob { task, job, bytes: JobBytes::InFlight(read), owner }),
                Err((error, buffer)) => {
                    jobs.put_back(owner, buffer, false);
                    task.end(job.target, Err(error.into()));
                }
            }
        }
        if jobs.waiting.len() < before {
            self.changed.notify_all();
        }
    }

    /// Takes a buffer, from the job's cache entry or the pool. `None` if all are in use.
    fn buffer(&self, jobs: &mut Jobs, entry: Option<usize>) -> Option<(Owner, deepnvme_io::Result<Buffer>)> {
        if let Some((entry, buffer)) = entry.and_then(|entry| Some((entry, jobs.cache.take_empty(entry)?))) {
            return Some((Owner::Cache(entry), Ok(buffer)));
        }
        if let Some(buffer) = jobs.spare.pop() {
            return Some((Owner::Pool, Ok(buffer)));
        }
        jobs.unallocated = jobs.unallocated.checked_sub(1)?;
        let made = Buffer::zeroed(self.buffer_bytes);
        Some((Owner::Pool, made.map_err(|error| deepnvme_io::Error::from_io("allocate", &error))))
    }

    fn convert(&self, scratch: &mut ThreadScratch, started: StartedJob) {
        let StartedJob { task, job, bytes, owner } = started;
        let (buffer, read) = bytes.wait();
        let fill = || {
            let (finished, began) = (read?, Instant::now());
            let lost = || Error::Plan("an error lost the memory of a read".into());
            let range = job.conversion.aligned_range().in_buffer();
            scratch.fill(&job, &buffer.as_ref().ok_or_else(lost)?.as_slice()[range])?;
            let bytes = job.conversion.bytes as u64;
            Ok(JobCost { read: finished.map(|finished| (bytes, finished)), converting: began.elapsed() })
        };
        // A panic becomes the task's error, and the thread goes on: no other thread would end the job.
        let result = catch_unwind(AssertUnwindSafe(fill)).unwrap_or_else(|panic| {
            *scratch = ThreadScratch::new(&self.engine);
            Err(panic_error(&job, &*panic))
        });
        let is_valid = result.is_ok();
        task.end(job.target, result);
        let mut jobs = lock(&self.jobs);
        jobs.put_back(owner, buffer, is_valid);
        self.start_reads(&mut jobs);
        drop(jobs);
        self.changed.notify_all();
    }
}

impl JobBytes {
    fn is_ready(&self) -> bool {
        match self {
            Self::InFlight(read) => read.is_done(),
            Self::Ready(_) => true,
        }
    }

    fn wait_timeout(&self, timeout: Duration) -> bool {
        match self {
            Self::InFlight(read) => read.wait_timeout(timeout),
            Self::Ready(_) => true,
        }
    }

    /// Waits for the bytes. Returns the buffer, unless an error lost it, and when its read finished.
    fn wait(self) -> (Option<Buffer>, Result<Option<Instant>>) {
        match self {
            Self::Ready(buffer) => (Some(buffer), Ok(None)),
            Self::InFlight(read) => {
                let (buffer, transfer) = read.wait();
                (buffer, transfer.map(|transfer| Some(transfer.finished)).map_err(Error::from))
            }
        }
    }
}

/// The scratch memory of one decoding thread.
#[derive(Debug)]
struct ThreadScratch {
    gpus: GpuAccess,
    workspace: Workspace,
    whole: Vec<u8>,
}

impl ThreadScratch {
    fn new(engine: &Engine) -> Self {
        Self { gpus: engine.gpu_access(), workspace: Workspace::default(), whole: Vec::new() }
    }

    /// Decodes a job's bytes into its target.
    fn fill(&mut self, job: &DecodeJob, bytes: &[u8]) -> Result<()> {
        let offset = job.conversion.offset;
        let on_host = job.target.device() == Device::Host;
        self.whole.clear();
        let Self { whole, workspace, .. } = self;
        let put = |at: usize, step: &[u8]| {
            if on_host {
                // Weights are read later and exceed any cache, so they bypass it.
                job.target.copy_non_temporal(at, step);
            } else {
                whole.extend_from_slice(step);
            }
            Ok::<(), deepnvme_codec::Error>(())
        };
        let converted = convert(&job.conversion, bytes, workspace, put);
        converted.map_err(|source| Error::Corrupt { path: job.file.path().to_path_buf(), offset, source })?;
        if !on_host {
            // The caller's stream may still use the memory.
            self.gpus.record_events([&job.target.region()])?.wait()?;
            self.gpus.copy_from_slice(&job.target, 0, &self.whole)?;
        }
        Ok(())
    }
}

fn panic_error(job: &DecodeJob, panic: &(dyn Any + Send)) -> Error {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let what = text.unwrap_or("without a message").to_owned();
    Error::Panicked { path: job.file.path().to_path_buf(), offset: job.conversion.offset, what }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every critical section leaves the state consistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[path = "decode_pool_tests.rs"]
mod tests;
