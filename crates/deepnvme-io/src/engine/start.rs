//! Starts the threads of an engine, and ends them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use deepnvme_cuda::own_this_thread;
use deepnvme_mem::ParentOnly;

use crate::backend::gds::{Gds, GdsBackend};
use crate::backend::{Backend, BackendKind, BackendSetup};
use crate::config::{Config, DirectMode};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::EngineGpus;
use crate::request::{RequestQueue, StreamWaitList};
use crate::start::start_thread;
use crate::stats::WorkerStats;
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Mutex, lock, mpsc};
use crate::trace::{Recorder, Tracer};
use crate::worker::{Accounts, BounceSetup, GdsSetup, Worker, WorkerSetup};

/// Creates the backend of one worker, on that worker's thread.
pub type BackendFactory = Arc<dyn Fn(&BackendSetup) -> Result<Box<dyn Backend>> + Send + Sync>;

/// The threads of an engine, and the state that ends them. Shared with the thread that waits for their end.
#[derive(Debug)]
pub(super) struct EngineThreads {
    queue: Arc<RequestQueue>,
    pub(super) wait_list: StreamWaitList,
    workers: Mutex<Vec<ParentOnly<JoinHandle<()>>>>,
}

/// The parts of an engine that its workers use.
pub(super) struct WorkerParts<'a> {
    pub(super) config: &'a Config,
    pub(super) stats: &'a [Arc<WorkerStats>],
    pub(super) gpus: &'a Arc<EngineGpus>,
    pub(super) gds: &'a Arc<Gds>,
    pub(super) recorder: &'a Arc<Recorder>,
}

impl EngineThreads {
    pub(super) fn new(queue: &Arc<RequestQueue>) -> Self {
        Self { queue: Arc::clone(queue), wait_list: StreamWaitList::new(queue), workers: Mutex::default() }
    }

    /// Waits for the requests that wait for GPU streams, then closes the queue, and waits until all requests and
    /// threads have ended. Concurrent calls wait equally long.
    pub(super) fn end(&self) {
        self.wait_list.close();
        self.queue.close();
        let mut workers = lock(&self.workers);
        for worker in workers.drain(..).filter_map(ParentOnly::into_inner) {
            // The panic of a worker is on stderr already, and no caller is left to report it to.
            let _ = worker.join();
        }
    }

    /// Starts one worker and waits until its backend is open.
    pub(super) fn start_worker(
        &self,
        worker_index: u32,
        parts: &WorkerParts<'_>,
        factory: BackendFactory,
    ) -> Result<BackendKind> {
        let config = parts.config;
        let setup = WorkerSetup {
            queue: Arc::clone(&self.queue),
            accounts: Accounts {
                stats: Arc::clone(&parts.stats[worker_index as usize]),
                tracer: Tracer::new(parts.recorder, Some(worker_index)),
            },
            worker_index,
            gpus: Arc::clone(parts.gpus),
            gds: GdsSetup { gds: Arc::clone(parts.gds), mode: config.gds },
            bounce: BounceSetup {
                buffer_bytes: config.bounce_buffer_bytes() as usize,
                buffers: config.bounce_buffers_per_worker() as usize,
                lock_pool: config.lock_pool,
                register: config.register_pool,
            },
            window: config.window,
        };
        let backend_setup = BackendSetup { queue_depth: config.queue_depth, submit: config.submit, worker_index };
        let gds = (config.gds != DirectMode::Disabled).then(|| Arc::clone(parts.gds));
        let (report, opened) = mpsc::sync_channel(1);
        let run = move || {
            own_this_thread();
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
            let ran = catch_unwind(AssertUnwindSafe(|| worker.run()));
            let panicked = || Err(Error::new(ErrorKind::Io, "engine", "a worker panicked; report this as a bug"));
            if let Err(error) = ran.unwrap_or_else(|_| panicked()) {
                tracing::error!(worker_index, %error, "a worker ended early");
                setup.queue.worker_failed(&error);
            }
        };
        let thread = start_thread(|| thread::Builder::new().name(format!("deepnvme-{worker_index}")).spawn(run))?;
        lock(&self.workers).push(ParentOnly::new(thread));
        let died = || Error::new(ErrorKind::Io, "engine", "a worker thread ended before its backend was open");
        opened.recv().map_err(|_| died())?
    }
}
