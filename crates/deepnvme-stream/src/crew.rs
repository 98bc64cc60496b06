//! Conversions of what arrives: some are read ahead while others are worked on, by threads and by whoever waits for them.
//!
//! A crew has as many buffers as its bound allows, and each of them is on its way to the disk or back as long as there is
//! anything to read: the disk never waits for a processor, unless all buffers are full. Half of the processors convert all
//! the time; the others compute, and one of those converts, too, while it has to wait for what it computes with.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use deepnvme_io::mem::{Buffer, Device, RegionMut};
use deepnvme_io::{Engine, GpuAccess, Pending, TensorFile};

use crate::arrival::{Workspace, convert};
use crate::error::{Error, Result};
use crate::task::Task;
use crate::unit::Conversion;

/// Direct I/O begins at such a place, in the file and in memory.
const BLOCK_BYTES: u64 = 4096;
/// More threads than this wait for the disk, whatever it is.
const THREADS_MAX: usize = 8;
/// Bytes of buffers for each thread, and for whoever waits: a disk needs some MiB under way to be at its best.
const BUFFERS_BYTES: usize = 16 << 20;

/// One conversion, with the memory that it fills.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) file: Arc<TensorFile>,
    pub(crate) conversion: Conversion,
    pub(crate) target: RegionMut,
}

/// A job whose bytes are on their way.
#[derive(Debug)]
struct Reading {
    task: Arc<Task>,
    job: Job,
    pending: Pending<RegionMut>,
    /// What is left of the buffer.
    rest: RegionMut,
    /// Bytes in front of the ones that are wanted.
    head: usize,
}

#[derive(Debug, Default)]
struct Jobs {
    /// There was no buffer for them yet.
    waiting: VecDeque<(Arc<Task>, Job)>,
    reading: VecDeque<Reading>,
    spare: Vec<Buffer>,
    /// Buffers that may be made still.
    unmade: usize,
    is_over: bool,
}

#[derive(Debug)]
struct Shared {
    engine: Arc<Engine>,
    buffers: usize,
    buffer_bytes: usize,
    jobs: Mutex<Jobs>,
    /// Something is being read, has been converted, or it is all over.
    changed: Condvar,
    /// Of those who wait.
    kits: Mutex<Vec<Kit>>,
}

/// The threads, and what they share.
#[derive(Debug)]
pub(crate) struct Crew {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    pid: u32,
}

/// Half as many threads as there are processors: the others compute.
fn threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    (cores / 2).clamp(1, THREADS_MAX)
}

/// How many convert at once where the disk is what all wait for: the threads, and who waits.
pub(crate) fn hands() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    (threads() + 1).min(cores)
}

impl Crew {
    /// A crew for conversions of at most so many bytes on disk.
    pub(crate) fn start(engine: &Arc<Engine>, read_bytes_max: usize) -> Result<Self> {
        Self::start_with(engine, read_bytes_max, threads())
    }

    fn start_with(engine: &Arc<Engine>, read_bytes_max: usize, wanted: usize) -> Result<Self> {
        // It begins somewhere in a block.
        let buffer_bytes = read_bytes_max.next_multiple_of(BLOCK_BYTES as usize) + BLOCK_BYTES as usize;
        let buffers = ((wanted + 1) * BUFFERS_BYTES / buffer_bytes).max(wanted + 1);
        let shared = Arc::new(Shared {
            engine: Arc::clone(engine),
            buffers,
            buffer_bytes,
            jobs: Mutex::new(Jobs { unmade: buffers, ..Jobs::default() }),
            changed: Condvar::new(),
            kits: Mutex::default(),
        });
        let mut threads = Vec::new();
        for index in 0..wanted {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name(format!("deepnvme-arrive-{index}"));
            match thread.spawn(move || shared.work()) {
                Ok(thread) => threads.push(thread),
                // Fewer do as well.
                Err(_) if !threads.is_empty() => break,
                Err(error) => return Err(deepnvme_io::Error::from_io("start a thread", &error).into()),
            }
        }
        Ok(Self { shared, threads, pid: std::process::id() })
    }

    /// Bytes of all buffers.
    pub(crate) fn bound_bytes(&self) -> u64 {
        (self.shared.buffers * self.shared.buffer_bytes) as u64
    }

    /// Has the jobs done; those that somebody waits for come first.
    pub(crate) fn begin(&self, jobs: Vec<Job>, is_urgent: bool) -> Arc<Task> {
        let task = Arc::new(Task::new(jobs.len()));
        let new = jobs.into_iter().map(|job| (Arc::clone(&task), job));
        let mut all = lock(&self.shared.jobs);
        if is_urgent {
            let before = std::mem::take(&mut all.waiting);
            all.waiting = new.chain(before).collect();
        } else {
            all.waiting.extend(new);
        }
        if self.is_here() {
            self.shared.read_ahead(&mut all);
        }
        task
    }

    /// Somebody waits for this task.
    pub(crate) fn hurry(&self, task: &Arc<Task>) {
        let mut jobs = lock(&self.shared.jobs);
        jobs.waiting.make_contiguous().sort_by_key(|(other, _)| !Arc::ptr_eq(other, task));
        jobs.reading.make_contiguous().sort_by_key(|reading| !Arc::ptr_eq(&reading.task, task));
    }

    /// Converts until all of a task is done, or that moment has come; whether all is done.
    pub(crate) fn help(&self, task: &Arc<Task>, until: Instant) -> bool {
        let shared = &self.shared;
        let mut kit = None;
        while self.is_here() {
            let left = until.saturating_duration_since(Instant::now());
            let mut jobs = lock(&shared.jobs);
            if task.is_done() || left.is_zero() {
                break;
            }
            let Some(reading) = jobs.take(Some(task)) else {
                // The last of it is being converted by others. Who ends a job takes the lock before it tells.
                drop(shared.changed.wait_timeout(jobs, left));
                continue;
            };
            drop(jobs);
            if reading.pending.wait_timeout(left) {
                let kit =
                    kit.get_or_insert_with(|| lock(&shared.kits).pop().unwrap_or_else(|| Kit::new(&shared.engine)));
                shared.convert(kit, reading);
            } else {
                lock(&shared.jobs).reading.push_front(reading);
                shared.changed.notify_all();
            }
        }
        lock(&shared.kits).extend(kit);
        task.is_done()
    }

    /// After a fork, all that was on its way is the parent's.
    fn is_here(&self) -> bool {
        self.pid == std::process::id()
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        if !self.is_here() {
            return; // the threads are the parent's
        }
        {
            let mut jobs = lock(&self.shared.jobs);
            jobs.is_over = true;
            for (task, job) in jobs.waiting.drain(..) {
                task.end(job.target, Err(Error::Closed));
            }
        }
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Jobs {
    /// What is converted next: of that task, if one is named, and what has come, as far as possible.
    fn take(&mut self, task: Option<&Arc<Task>>) -> Option<Reading> {
        let is_wanted = |reading: &Reading| task.is_none_or(|task| Arc::ptr_eq(&reading.task, task));
        let has_come = |reading: &Reading| reading.pending.is_done();
        let place = self.reading.iter().position(|reading| is_wanted(reading) && has_come(reading));
        let place = place.or_else(|| self.reading.iter().position(has_come));
        let place = place.or_else(|| self.reading.iter().position(is_wanted));
        self.reading.remove(place.unwrap_or(0))
    }
}

impl Shared {
    /// What a thread does.
    fn work(&self) {
        let mut kit = Kit::new(&self.engine);
        loop {
            let mut jobs = lock(&self.jobs);
            let Some(reading) = jobs.take(None) else {
                if jobs.is_over {
                    return;
                }
                drop(self.changed.wait(jobs));
                continue;
            };
            drop(jobs);
            self.convert(&mut kit, reading);
        }
    }

    /// Starts to read as much as there are buffers for; a failure ends a job. Whoever adds jobs, or gives a buffer back,
    /// calls this before the lock is free again: no job waits beside a buffer.
    fn read_ahead(&self, jobs: &mut Jobs) {
        let before = jobs.waiting.len();
        while !jobs.waiting.is_empty() && (!jobs.spare.is_empty() || jobs.unmade > 0) {
            let buffer = jobs.spare.pop().map_or_else(
                || {
                    jobs.unmade -= 1;
                    Buffer::zeroed(self.buffer_bytes).map_err(|error| deepnvme_io::Error::from_io("allocate", &error))
                },
                Ok,
            );
            let Some((task, job)) = jobs.waiting.pop_front() else { return };
            let Conversion { offset, bytes, .. } = job.conversion;
            let begin = offset / BLOCK_BYTES * BLOCK_BYTES;
            let head = (offset - begin) as usize;
            let started = buffer.and_then(|buffer| {
                let (target, rest) = buffer.into_region().split_at(head + bytes);
                Ok((self.engine.read(&job.file, begin, target)?, rest))
            });
            match started {
                Ok((pending, rest)) => jobs.reading.push_back(Reading { task, job, pending, rest, head }),
                Err(error) => {
                    jobs.unmade += 1;
                    task.end(job.target, Err(error.into()));
                }
            }
        }
        if jobs.waiting.len() < before {
            self.changed.notify_all();
        }
    }

    fn convert(&self, kit: &mut Kit, reading: Reading) {
        let Reading { task, job, pending, rest, head } = reading;
        let (memory, transfer) = pending.wait();
        let whole = memory.and_then(|memory| memory.join(rest).ok()).and_then(|whole| whole.into_buffer().ok());
        let result = transfer.map_err(Error::from).and_then(|transfer| {
            let began = Instant::now();
            let lost = || Error::Plan("the memory of a read did not come home".into());
            let bytes = whole.as_ref().ok_or_else(lost)?.as_slice();
            kit.fill(&job, &bytes[head..head + job.conversion.bytes])?;
            Ok((job.conversion.bytes as u64, transfer.finished, began.elapsed()))
        });
        task.end(job.target, result);
        let mut jobs = lock(&self.jobs);
        match whole {
            Some(buffer) => jobs.spare.push(buffer),
            None => jobs.unmade += 1,
        }
        self.read_ahead(&mut jobs);
        drop(jobs);
        self.changed.notify_all();
    }
}

/// What somebody who converts needs for it.
#[derive(Debug)]
struct Kit {
    gpus: GpuAccess,
    workspace: Workspace,
    whole: Vec<u8>,
}

impl Kit {
    fn new(engine: &Engine) -> Self {
        Self { gpus: engine.gpu_access(), workspace: Workspace::default(), whole: Vec::new() }
    }

    /// Converts the bytes of a job into its memory.
    fn fill(&mut self, job: &Job, bytes: &[u8]) -> Result<()> {
        let offset = job.conversion.offset;
        let on_host = job.target.device() == Device::Host;
        self.whole.clear();
        let Self { whole, workspace, .. } = self;
        let put = |at: usize, step: &[u8]| {
            if on_host {
                // A layer that is computed with later, and is larger than any cache.
                job.target.copy_past_cache(at, step);
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

#[cfg(test)]
#[path = "crew_tests.rs"]
mod tests;
