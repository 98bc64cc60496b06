//! Conversions of what arrives: some are read ahead while others are worked on, by threads and by whoever waits for them.
//!
//! A crew has as many buffers as its bound allows, and each of them is on its way to the disk or back as long as there is
//! anything to read: the disk never waits for a processor, unless all buffers are full. Half of the processors convert all
//! the time; the others compute, and one of those converts, too, while it has to wait for what it computes with. What has a
//! berth in the stash is read once, and converted from there ever after.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use deepnvme_io::mem::sync::ignore_poison;
use deepnvme_io::mem::{Buffer, Device, RegionMut};
use deepnvme_io::{Engine, GpuAccess, Pending, Refused, TensorFile};

use crate::arrival::{Workspace, convert};
use crate::error::{Error, Result};
use crate::stash::Stash;
use crate::sync::{Condvar, Instant, JoinHandle, Mutex, MutexGuard, thread};
use crate::task::{Done, Task};
use crate::unit::{BLOCK_BYTES, Conversion};
use deepnvme_io::start_thread;

/// More threads than this wait for the disk, whatever it is.
const THREADS_MAX: usize = 8;
/// Bytes of buffers for each thread, and for whoever waits: a disk needs some MiB under way to be at its best.
const BUFFERS_BYTES: usize = 16 << 20;

/// Who waits for somebody else's bytes, to have their buffer, looks again after this whether there is one.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// One conversion, with the memory that it fills.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) file: Arc<TensorFile>,
    pub(crate) conversion: Conversion,
    pub(crate) target: RegionMut,
    /// Where in the stash its bytes have a place.
    pub(crate) berth: Option<usize>,
}

/// A job whose bytes are on their way, or here.
#[derive(Debug)]
struct Reading {
    task: Arc<Task>,
    job: Job,
    bytes: Bytes,
    /// Whose the buffer is.
    owner: Owner,
}

#[derive(Debug)]
enum Bytes {
    /// With what is left of the buffer.
    Coming(Pending<RegionMut>, RegionMut),
    Here(Buffer),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Owner {
    Crew,
    /// The stash, and the number of the berth.
    Stash(usize),
}

#[derive(Debug, Default)]
struct Jobs {
    /// There was no buffer for them yet.
    waiting: VecDeque<(Arc<Task>, Job)>,
    reading: VecDeque<Reading>,
    spare: Vec<Buffer>,
    /// Buffers that may be made still.
    unmade: usize,
    stash: Stash,
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
    creator: deepnvme_io::mem::CreatorProcess,
}

/// Half as many threads as there are processors: the others compute.
fn threads() -> usize {
    let cores = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    (cores / 2).clamp(1, THREADS_MAX)
}

/// How many convert at once where the disk is what all wait for: the threads, and who waits.
pub(crate) fn hands() -> usize {
    let cores = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    (threads() + 1).min(cores)
}

impl Crew {
    /// A crew for conversions of at most so many bytes on disk.
    pub(crate) fn start(engine: &Arc<Engine>, read_bytes_max: usize, stash: Stash) -> Result<Self> {
        Self::start_with(engine, read_bytes_max, stash, threads())
    }

    fn start_with(engine: &Arc<Engine>, read_bytes_max: usize, stash: Stash, wanted: usize) -> Result<Self> {
        // It begins somewhere in a block.
        let buffer_bytes = read_bytes_max.next_multiple_of(BLOCK_BYTES as usize) + BLOCK_BYTES as usize;
        let buffers = ((wanted + 1) * BUFFERS_BYTES / buffer_bytes).max(wanted + 1);
        let shared = Arc::new(Shared {
            engine: Arc::clone(engine),
            buffers,
            buffer_bytes,
            jobs: Mutex::new(Jobs { unmade: buffers, stash, ..Jobs::default() }),
            changed: Condvar::new(),
            kits: Mutex::default(),
        });
        let mut threads = Vec::new();
        for index in 0..wanted {
            let shared = Arc::clone(&shared);
            let thread = thread::Builder::new().name(format!("deepnvme-arrive-{index}"));
            match start_thread(|| thread.spawn(move || shared.work())) {
                Ok(thread) => threads.push(thread),
                // Fewer do as well.
                Err(_) if !threads.is_empty() => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Self { shared, threads, creator: deepnvme_io::mem::CreatorProcess::current() })
    }

    /// Bytes of all buffers.
    pub(crate) fn bound_bytes(&self) -> u64 {
        (self.shared.buffers * self.shared.buffer_bytes) as u64
    }

    /// Has the jobs done; those that somebody waits for come first.
    pub(crate) fn begin(&self, jobs: Vec<Job>, is_urgent: bool) -> Arc<Task> {
        let task = Arc::new(Task::new(jobs.len()));
        let mut new: VecDeque<_> = jobs.into_iter().map(|job| (Arc::clone(&task), job)).collect();
        let mut all = lock(&self.shared.jobs);
        if is_urgent {
            new.append(&mut all.waiting);
            all.waiting = new;
        } else {
            all.waiting.append(&mut new);
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
            let is_own = Arc::ptr_eq(&reading.task, task);
            if reading.bytes.wait_timeout(if is_own { left } else { left.min(LOOK_AGAIN) }) {
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
        self.creator.is_current()
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
    /// A buffer comes home to its owner; `None` is one that was lost: a berth then stays empty.
    fn put_back(&mut self, owner: Owner, buffer: Option<Buffer>, is_right: bool) {
        match (owner, buffer) {
            (Owner::Stash(berth), Some(buffer)) => self.stash.put(berth, buffer, is_right),
            (Owner::Crew, Some(buffer)) => self.spare.push(buffer),
            (Owner::Crew, None) => self.unmade += 1,
            (Owner::Stash(_), None) => {}
        }
    }

    /// What is converted next: of that task, if one is named, and what has come, as far as possible. With a task, nothing of
    /// another one that has not come, unless the task waits for a buffer.
    fn take(&mut self, task: Option<&Arc<Task>>) -> Option<Reading> {
        let is_wanted = |reading: &Reading| task.is_none_or(|task| Arc::ptr_eq(&reading.task, task));
        let has_come = |reading: &Reading| reading.bytes.have_come();
        let place = self.reading.iter().position(|reading| is_wanted(reading) && has_come(reading));
        let place = place.or_else(|| self.reading.iter().position(has_come));
        let place = place.or_else(|| self.reading.iter().position(is_wanted));
        // What others wait for, and has not come, is left to them, unless its buffer is needed: one's own task may be done
        // long before.
        let needs_buffer = |task: &Arc<Task>| self.waiting.iter().any(|(other, _)| Arc::ptr_eq(other, task));
        let place = place.or_else(|| task.is_some_and(needs_buffer).then_some(0));
        self.reading.remove(place?)
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
        while let Some((task, job)) = jobs.waiting.pop_front() {
            if let Some((berth, buffer)) = job.berth.and_then(|berth| Some((berth, jobs.stash.take_full(berth)?))) {
                let (bytes, owner) = (Bytes::Here(buffer), Owner::Stash(berth));
                jobs.reading.push_back(Reading { task, job, bytes, owner });
                continue;
            }
            let Some((owner, buffer)) = self.buffer(jobs, job.berth) else {
                jobs.waiting.push_front((task, job));
                break;
            };
            let Conversion { offset, bytes, .. } = job.conversion;
            let head = job.conversion.head();
            let started = buffer.map_err(|error| (error, None)).and_then(|buffer| {
                let (target, rest) = buffer.into_region().split_at(head + bytes);
                match self.engine.offer_read(&job.file, offset - head as u64, target) {
                    Ok(pending) => Ok(Bytes::Coming(pending, rest)),
                    Err(Refused { error, memory }) => Err((error, joined(memory, rest))),
                }
            });
            match started {
                Ok(bytes) => jobs.reading.push_back(Reading { task, job, bytes, owner }),
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

    /// Memory to read into, and whose it is: of its berth, if that is free; `None` where all is in use.
    fn buffer(&self, jobs: &mut Jobs, berth: Option<usize>) -> Option<(Owner, deepnvme_io::Result<Buffer>)> {
        if let Some((berth, buffer)) = berth.and_then(|berth| Some((berth, jobs.stash.take_empty(berth)?))) {
            return Some((Owner::Stash(berth), Ok(buffer)));
        }
        if let Some(buffer) = jobs.spare.pop() {
            return Some((Owner::Crew, Ok(buffer)));
        }
        jobs.unmade = jobs.unmade.checked_sub(1)?;
        let made = Buffer::zeroed(self.buffer_bytes);
        Some((Owner::Crew, made.map_err(|error| deepnvme_io::Error::from_io("allocate", &error))))
    }

    fn convert(&self, kit: &mut Kit, reading: Reading) {
        let Reading { task, job, bytes, owner } = reading;
        let (buffer, read) = bytes.wait();
        let fill = || {
            let (finished, began) = (read?, Instant::now());
            let lost = || Error::Plan("the memory of a read did not come home".into());
            let (head, bytes) = (job.conversion.head(), job.conversion.bytes);
            kit.fill(&job, &buffer.as_ref().ok_or_else(lost)?.as_slice()[head..head + bytes])?;
            Ok(Done { read: finished.map(|finished| (bytes as u64, finished)), converting: began.elapsed() })
        };
        // Whoever waits for the task is told of a panic, and the thread goes on: nobody else would end the job.
        let result = catch_unwind(AssertUnwindSafe(fill)).unwrap_or_else(|panic| {
            *kit = Kit::new(&self.engine);
            Err(panicked(&job, &*panic))
        });
        let is_right = result.is_ok();
        task.end(job.target, result);
        let mut jobs = lock(&self.jobs);
        jobs.put_back(owner, buffer, is_right);
        self.read_ahead(&mut jobs);
        drop(jobs);
        self.changed.notify_all();
    }
}

/// The buffer out of its parts.
fn joined(memory: Option<RegionMut>, rest: RegionMut) -> Option<Buffer> {
    memory.and_then(|memory| memory.join(rest).ok()).and_then(|whole| whole.into_buffer().ok())
}

impl Bytes {
    fn have_come(&self) -> bool {
        match self {
            Self::Coming(pending, _) => pending.is_done(),
            Self::Here(_) => true,
        }
    }

    fn wait_timeout(&self, timeout: Duration) -> bool {
        match self {
            Self::Coming(pending, _) => pending.wait_timeout(timeout),
            Self::Here(_) => true,
        }
    }

    /// The buffer, unless it was lost to an error, and when they had come, if they had to.
    fn wait(self) -> (Option<Buffer>, Result<Option<Instant>>) {
        match self {
            Self::Here(buffer) => (Some(buffer), Ok(None)),
            Self::Coming(pending, rest) => {
                let (memory, transfer) = pending.wait();
                (joined(memory, rest), transfer.map(|transfer| Some(transfer.finished)).map_err(Error::from))
            }
        }
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
                job.target.copy_non_temporal(at, step);
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

fn panicked(job: &Job, panic: &(dyn Any + Send)) -> Error {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let what = text.unwrap_or("without a message").to_owned();
    Error::Panicked { path: job.file.path().to_path_buf(), offset: job.conversion.offset, what }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every critical section leaves its state whole.
    ignore_poison(mutex.lock())
}

#[cfg(test)]
#[path = "crew_tests.rs"]
mod tests;
