//! The threads, and the queues between them and the backend: ops out, completions back.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{Builder, JoinHandle};

use deepnvme_cuda::own_this_thread;
use deepnvme_mem::sync::ignore_poison;

use crate::backend::contract::Wake;
use crate::op::{Completion, Errno, Op};
use crate::start::start_thread;

/// Stack size of a thread. Small, since it makes system calls, or calls of cuFile.
const STACK_BYTES: usize = 128 << 10;

/// Performs some ops, and passes each completion on as soon as it exists.
pub(in crate::backend) type Perform = Box<dyn Fn(Vec<Op>, &mut dyn FnMut(Completion)) + Send + Sync>;

/// Extends a call for one op to several ops.
pub(in crate::backend) fn one_by_one(perform: fn(&Op) -> Result<usize, Errno>) -> Perform {
    Box::new(move |ops, finish| {
        for op in ops {
            let result = perform(&op);
            finish(Completion { op, result });
        }
    })
}

/// Threads that start on demand and end with the pool, after all its work is done.
pub(in crate::backend) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    threads_max: usize,
    worker_index: u32,
}

/// The state shared by the threads and the backend.
pub(in crate::backend) struct Shared {
    perform: Perform,
    /// Maximum ops that a thread takes at once.
    ops_per_thread_max: usize,
    /// Maximum threads that share the queue, at least 1.
    threads_max: usize,
    /// Woken by every completion, for a thread that waits elsewhere than in `take_completions`.
    listener: Option<Arc<dyn Wake>>,
    queued: Mutex<OpQueue>,
    op_queued: Condvar,
    done: Mutex<Done>,
    op_completed: Condvar,
}

#[derive(Default)]
struct OpQueue {
    ops: VecDeque<Op>,
    /// Threads that wait for an op.
    idle: usize,
    closed: bool,
}

#[derive(Default)]
struct Done {
    completions: Vec<Completion>,
    /// The number of completions that the backend waits for. Threads do not wake it earlier.
    wanted: usize,
    woken: bool,
}

impl Pool {
    /// Creates a pool without threads.
    pub(in crate::backend) fn new(
        worker_index: u32,
        threads_max: u32,
        ops_per_thread_max: usize,
        perform: Perform,
        listener: Option<Arc<dyn Wake>>,
    ) -> Self {
        let threads_max = threads_max as usize;
        let shared = Shared {
            perform,
            ops_per_thread_max,
            threads_max: threads_max.max(1),
            listener,
            queued: Mutex::default(),
            op_queued: Condvar::new(),
            done: Mutex::default(),
            op_completed: Condvar::new(),
        };
        Self { shared: Arc::new(shared), threads: Vec::new(), threads_max, worker_index }
    }

    /// Returns the queues, for waiting and waking.
    pub(in crate::backend) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Passes ops to the threads, and starts threads if there are too few. Performs the ops itself if no thread can be
    /// started. Empties `ops`.
    pub(in crate::backend) fn run(&mut self, ops: &mut Vec<Op>) {
        if ops.is_empty() {
            return;
        }
        let mut queued = lock(&self.shared.queued);
        let count = ops.len();
        queued.ops.extend(ops.drain(..));
        let missing = queued.ops.len().saturating_sub(queued.idle);
        // A wake is a system call even if nobody waits.
        let woken = count.min(queued.idle);
        drop(queued);
        for _ in 0..woken {
            self.shared.op_queued.notify_one();
        }
        for _ in 0..missing {
            if self.threads.len() >= self.threads_max || !self.start_thread() {
                break;
            }
        }
        if self.threads.is_empty() {
            // No thread could be started, and nothing else would perform these ops.
            self.shared.run_queue();
        }
    }

    fn start_thread(&mut self) -> bool {
        let shared = Arc::clone(&self.shared);
        let name = format!("dnvme-{}-io-{}", self.worker_index, self.threads.len());
        let started = start_thread(|| Builder::new().name(name).stack_size(STACK_BYTES).spawn(move || shared.serve()));
        started.is_ok_and(|thread| {
            self.threads.push(thread);
            true
        })
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        lock(&self.shared.queued).closed = true;
        self.shared.op_queued.notify_all();
        for thread in self.threads.drain(..) {
            // An error means that the thread panicked. Its ops are lost with it.
            let _ = thread.join();
        }
        // A waker may outlive the pool, but the memory of unreaped ops must not.
        let unreaped = std::mem::take(&mut lock(&self.shared.done).completions);
        drop(unreaped);
    }
}

impl Shared {
    /// Runs a thread: takes ops until the queue is closed and empty.
    fn serve(&self) {
        own_this_thread();
        let mut queued = lock(&self.queued);
        loop {
            let ops = self.take_share(&mut queued);
            if !ops.is_empty() {
                drop(queued);
                self.perform(ops);
                queued = lock(&self.queued);
            } else if queued.closed {
                return;
            } else {
                queued.idle += 1;
                queued = ignore_poison(self.op_queued.wait(queued));
                queued.idle -= 1;
            }
        }
    }

    /// Performs everything in the queue on the calling thread.
    fn run_queue(&self) {
        loop {
            let ops = self.take_share(&mut lock(&self.queued));
            if ops.is_empty() {
                return;
            }
            self.perform(ops);
        }
    }

    /// Takes one thread's share of the queue, so that the other threads have work.
    fn take_share(&self, queued: &mut OpQueue) -> Vec<Op> {
        let count = queued.ops.len().div_ceil(self.threads_max).min(self.ops_per_thread_max);
        queued.ops.drain(..count).collect()
    }

    fn perform(&self, ops: Vec<Op>) {
        (self.perform)(ops, &mut |completion| self.finish(completion));
    }

    fn finish(&self, completion: Completion) {
        let mut done = lock(&self.done);
        done.completions.push(completion);
        let is_awaited = done.wanted > 0 && done.completions.len() >= done.wanted;
        drop(done);
        if is_awaited {
            self.op_completed.notify_one();
        }
        if let Some(listener) = &self.listener {
            listener.wake();
        }
    }

    /// Waits for `min` completions or a wake, and moves all completions to `completions`.
    pub(in crate::backend) fn take_completions(&self, min: u32, completions: &mut Vec<Completion>) {
        let mut done = lock(&self.done);
        done.wanted = min as usize;
        while done.completions.len() < done.wanted && !done.woken {
            done = ignore_poison(self.op_completed.wait(done));
        }
        if min > 0 {
            done.woken = false;
        }
        done.wanted = 0;
        completions.append(&mut done.completions);
    }
}

impl Wake for Shared {
    fn wake(&self) {
        lock(&self.done).woken = true;
        self.op_completed.notify_one();
    }
}

/// Locks, ignoring poison: a thread that panicked with the lock left no partial change.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    ignore_poison(mutex.lock())
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use deepnvme_mem::Buffer;
    use smallvec::smallvec;

    use super::*;
    use crate::backend::call::perform;
    use crate::op::{OpKind, Token};

    fn read(token: u64) -> Op {
        let file = Arc::new(File::open("/proc/self/exe").unwrap().into());
        let iovecs = smallvec![Buffer::zeroed(4).unwrap().into_region().region()];
        Op { token: Token(token), kind: OpKind::Read, file, offset: 0, iovecs, cufile: None }
    }

    #[test]
    fn ops_are_done_even_if_no_thread_can_start() {
        let mut pool = Pool::new(0, 0, 1, one_by_one(perform), None);
        pool.run(&mut vec![read(1), read(2)]);
        let mut completions = Vec::new();
        pool.shared().take_completions(2, &mut completions);
        assert_eq!(completions.len(), 2);
        for completion in completions {
            let mut magic = [0; 4];
            completion.op.iovecs[0].copy_to_slice(0, &mut magic);
            assert_eq!((completion.result, &magic), (Ok(4), b"\x7fELF"));
        }
    }

    #[test]
    fn threads_start_when_needed_and_no_more_than_allowed() {
        let mut pool = Pool::new(7, 3, 1, one_by_one(perform), None);
        assert!(pool.threads.is_empty());
        pool.run(&mut vec![read(0)]);
        assert_eq!(pool.threads.len(), 1);
        assert_eq!(pool.threads[0].thread().name(), Some("dnvme-7-io-0"));
        pool.run(&mut (1..50).map(read).collect());
        assert_eq!(pool.threads.len(), 3);
        let mut completions = Vec::new();
        pool.shared().take_completions(50, &mut completions);
        assert_eq!(completions.len(), 50);
    }
}
