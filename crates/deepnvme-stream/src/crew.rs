//! Threads that convert what arrives: each reads the next stretch while it converts the one before.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use deepnvme_io::mem::{Buffer, Device, RegionMut};
use deepnvme_io::{Engine, GpuAccess, Pending, TensorFile};

use crate::arrival::{Workspace, convert};
use crate::error::{Error, Result};
use crate::unit::{CONVERSION_BYTES_MAX, Conversion};

/// Direct I/O begins at such a place, in the file and in memory.
const BLOCK_BYTES: u64 = 4096;
/// More threads than this wait for the disk, whatever it is.
const THREADS_MAX: usize = 8;

/// The conversions of one unit on their way.
#[derive(Debug)]
pub(crate) struct Task {
    state: Mutex<TaskState>,
    over: Condvar,
}

#[derive(Debug)]
struct TaskState {
    left: usize,
    /// Memory that has come home.
    home: Vec<RegionMut>,
    error: Option<Error>,
    bytes: u64,
    finished: Instant,
    converting: Duration,
}

/// What a task has done.
#[derive(Debug)]
pub(crate) struct Converted {
    pub(crate) home: Vec<RegionMut>,
    /// Bytes that were read, when the last of them had come, and how long processors worked on them.
    pub(crate) result: Result<(u64, Instant, Duration)>,
}

impl Task {
    fn new(conversions: usize) -> Self {
        let state = TaskState {
            left: conversions,
            home: Vec::with_capacity(conversions),
            error: None,
            bytes: 0,
            finished: Instant::now(),
            converting: Duration::ZERO,
        };
        Self { state: Mutex::new(state), over: Condvar::new() }
    }

    pub(crate) fn is_done(&self) -> bool {
        lock(&self.state).left == 0
    }

    /// Waits at most that long; whether all is done.
    pub(crate) fn wait_timeout(&self, timeout: Duration) -> bool {
        let state = lock(&self.state);
        let waited = self.over.wait_timeout_while(state, timeout, |state| state.left > 0);
        waited.unwrap_or_else(PoisonError::into_inner).0.left == 0
    }

    /// The memory and the result, once all is done.
    pub(crate) fn finish(&self) -> Option<Converted> {
        let mut state = lock(&self.state);
        if state.left > 0 {
            return None;
        }
        let home = std::mem::take(&mut state.home);
        let result = match state.error.clone() {
            Some(error) => Err(error),
            None => Ok((state.bytes, state.finished, state.converting)),
        };
        Some(Converted { home, result })
    }

    fn end(&self, target: RegionMut, result: Result<(u64, Instant, Duration)>) {
        let mut state = lock(&self.state);
        state.home.push(target);
        state.left -= 1;
        match result {
            Ok((bytes, finished, converting)) => {
                state.bytes += bytes;
                state.finished = state.finished.max(finished);
                state.converting += converting;
            }
            Err(error) => drop(state.error.get_or_insert(error)),
        }
        if state.left == 0 {
            self.over.notify_all();
        }
    }
}

/// One conversion, with the memory that it fills.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) file: Arc<TensorFile>,
    pub(crate) conversion: Conversion,
    pub(crate) target: RegionMut,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: Mutex<Jobs>,
    filled: Condvar,
}

#[derive(Debug, Default)]
struct Jobs {
    waiting: VecDeque<(Arc<Task>, Job)>,
    is_over: bool,
}

/// The threads.
#[derive(Debug)]
pub(crate) struct Crew {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
    pid: u32,
}

/// Half as many threads as there are processors: the others compute.
pub(crate) fn threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    (cores / 2).clamp(1, THREADS_MAX)
}

impl Crew {
    /// As many as [`threads`] says.
    pub(crate) fn start(engine: &Arc<Engine>) -> Result<Self> {
        let queue = Arc::<Queue>::default();
        let mut threads = Vec::new();
        for index in 0..self::threads() {
            let (queue, engine) = (Arc::clone(&queue), Arc::clone(engine));
            let thread = std::thread::Builder::new().name(format!("deepnvme-arrive-{index}"));
            match thread.spawn(move || Member::new(&engine).run(&queue)) {
                Ok(thread) => threads.push(thread),
                // Fewer do as well.
                Err(_) if !threads.is_empty() => break,
                Err(error) => return Err(deepnvme_io::Error::from_io("start a thread", &error).into()),
            }
        }
        Ok(Self { queue, threads, pid: std::process::id() })
    }

    /// Bytes that the threads have for what they read.
    pub(crate) fn bound_bytes(&self) -> u64 {
        (self.threads.len() * 2 * CONVERSION_BYTES_MAX) as u64
    }

    /// Has the jobs done; those that somebody waits for come first.
    pub(crate) fn begin(&self, jobs: Vec<Job>, is_urgent: bool) -> Arc<Task> {
        let task = Arc::new(Task::new(jobs.len()));
        let mut queue = lock(&self.queue.jobs);
        for job in jobs.into_iter().rev() {
            queue.waiting.push_front((Arc::clone(&task), job));
        }
        if !is_urgent {
            // Behind all that was there.
            let count = lock(&task.state).left;
            queue.waiting.rotate_left(count);
        }
        drop(queue);
        self.queue.filled.notify_all();
        task
    }

    /// Somebody waits for this task.
    pub(crate) fn hurry(&self, task: &Arc<Task>) {
        lock(&self.queue.jobs).waiting.make_contiguous().sort_by_key(|(other, _)| !Arc::ptr_eq(other, task));
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            return; // the threads are the parent's
        }
        {
            let mut queue = lock(&self.queue.jobs);
            queue.is_over = true;
            for (task, job) in queue.waiting.drain(..) {
                task.end(job.target, Err(Error::Closed));
            }
        }
        self.queue.filled.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Queue {
    /// The next job; waits for one where `may_wait` says so. `None` when there is none, or it is all over.
    fn next(&self, may_wait: bool) -> Option<(Arc<Task>, Job)> {
        let mut jobs = lock(&self.jobs);
        while may_wait && jobs.waiting.is_empty() && !jobs.is_over {
            jobs = self.filled.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        }
        jobs.waiting.pop_front()
    }
}

/// What a thread has.
struct Member {
    engine: Arc<Engine>,
    gpus: GpuAccess,
    buffers: Vec<Buffer>,
    workspace: Workspace,
    whole: Vec<u8>,
}

/// A job whose bytes are on their way.
struct Reading {
    task: Arc<Task>,
    job: Job,
    pending: Pending<RegionMut>,
    /// What is left of the buffer.
    rest: RegionMut,
    /// Bytes in front of the ones that are wanted.
    head: usize,
}

impl Member {
    fn new(engine: &Arc<Engine>) -> Self {
        let (gpus, buffers) = (engine.gpu_access(), Vec::new());
        Self { engine: Arc::clone(engine), gpus, buffers, workspace: Workspace::default(), whole: Vec::new() }
    }

    fn run(mut self, queue: &Queue) {
        let mut reading: Option<Reading> = None;
        loop {
            let next = queue.next(reading.is_none());
            let is_over = next.is_none() && reading.is_none();
            let next = next.and_then(|(task, job)| self.start(task, job));
            if let Some(reading) = reading.take() {
                self.convert(reading);
            }
            if is_over {
                return;
            }
            reading = next;
        }
    }

    /// Starts to read; a failure ends the job.
    fn start(&mut self, task: Arc<Task>, job: Job) -> Option<Reading> {
        let Conversion { offset, bytes, .. } = job.conversion;
        let begin = offset / BLOCK_BYTES * BLOCK_BYTES;
        let head = (offset - begin) as usize;
        let buffer = match self.buffers.pop() {
            Some(buffer) => Ok(buffer),
            None => Buffer::zeroed(CONVERSION_BYTES_MAX + BLOCK_BYTES as usize),
        };
        let started = buffer.map_err(|error| deepnvme_io::Error::from_io("allocate", &error)).and_then(|buffer| {
            let (target, rest) = buffer.into_region().split_at(head + bytes);
            Ok((self.engine.read(&job.file, begin, target)?, rest))
        });
        match started {
            Ok((pending, rest)) => Some(Reading { task, job, pending, rest, head }),
            Err(error) => {
                task.end(job.target, Err(error.into()));
                None
            }
        }
    }

    fn convert(&mut self, reading: Reading) {
        let Reading { task, job, pending, rest, head } = reading;
        let (memory, transfer) = pending.wait();
        let whole = memory.and_then(|memory| memory.join(rest).ok()).and_then(|whole| whole.into_buffer().ok());
        let result = transfer.map_err(Error::from).and_then(|transfer| {
            let began = Instant::now();
            let lost = || Error::Plan("the memory of a read did not come home".into());
            let bytes = whole.as_ref().ok_or_else(lost)?.as_slice();
            self.fill(&job, &bytes[head..head + job.conversion.bytes])?;
            Ok((job.conversion.bytes as u64, transfer.finished, began.elapsed()))
        });
        self.buffers.extend(whole);
        task.end(job.target, result);
    }

    /// Converts the bytes of a job into its memory.
    fn fill(&mut self, job: &Job, bytes: &[u8]) -> Result<()> {
        let offset = job.conversion.offset;
        let on_host = job.target.device() == Device::Host;
        self.whole.clear();
        let Self { whole, workspace, .. } = self;
        let put = |at: usize, step: &[u8]| {
            if on_host {
                job.target.copy_from_slice(at, step);
            } else {
                whole.extend_from_slice(step);
            }
            Ok::<(), deepnvme_codec::Error>(())
        };
        let converted = convert(&job.conversion, bytes, workspace, put);
        converted.map_err(|source| Error::Corrupt { path: job.file.path().to_path_buf(), offset, source })?;
        if !on_host {
            // What the caller's stream still computes with is not overwritten.
            self.gpus.points([&job.target.region()])?.wait()?;
            self.gpus.copy_from_slice(&job.target, 0, &self.whole)?;
        }
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every critical section leaves its state whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
