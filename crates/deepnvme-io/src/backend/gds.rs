//! GPUDirect Storage beside another backend: ops whose memory is a GPU's go to cuFile, on threads of its own, since its
//! transfers block; all others go where they always go.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock, Weak};

use deepnvme_cuda::{CuFile, FileHandle, IoError};
use deepnvme_mem::Device;

use super::threads::pool::{Perform, Pool};
use super::{Backend, BackendKind, BackendSetup, Wake};
use crate::error::Result;
use crate::gpus::Gpus;
use crate::op::{Completion, Errno, Op, OpKind, Submit};
use crate::sync::{Mutex, lock};

/// Transfers of one worker at the same moment.
const THREADS_MAX: u32 = 8;

/// What the engine has of cuFile: opened when a request first could use it.
#[derive(Debug)]
pub(crate) struct Gds {
    gpus: Arc<Gpus>,
    opened: OnceLock<std::result::Result<CuFile, String>>,
    /// By the address of the descriptor that ops name.
    files: Mutex<HashMap<usize, Weak<FileHandle>>>,
    /// What cuFile said last of a transfer that it refused.
    refusal: Mutex<Option<String>>,
}

impl Gds {
    pub(crate) fn new(gpus: &Arc<Gpus>) -> Self {
        let (files, refusal) = (Mutex::default(), Mutex::default());
        Self { gpus: Arc::clone(gpus), opened: OnceLock::new(), files, refusal }
    }

    /// cuFile, or why it is no better than a bounce slot.
    pub(crate) fn cufile(&self) -> std::result::Result<&CuFile, &str> {
        let open = || {
            let cufile = CuFile::open().map_err(|absent| absent.to_string())?;
            cufile.compatibility_reason().map_or(Ok(cufile), |reason| Err(reason.to_owned()))
        };
        self.opened.get_or_init(open).as_ref().map_err(String::as_str)
    }

    /// Has cuFile know a file, for as long as the answer lives.
    pub(crate) fn register(&self, file: &Arc<OwnedFd>) -> std::result::Result<Arc<FileHandle>, String> {
        let cufile = self.cufile()?;
        let handle = Arc::new(FileHandle::new(cufile, file.as_fd()).map_err(|error| error.to_string())?);
        let mut files = lock(&self.files);
        files.retain(|_, handle| handle.strong_count() > 0);
        files.insert(Arc::as_ptr(file).addr(), Arc::downgrade(&handle));
        Ok(handle)
    }

    /// What cuFile said last, in words.
    pub(crate) fn take_refusal(&self) -> Option<String> {
        lock(&self.refusal).take()
    }

    fn perform(&self, op: &Op) -> std::result::Result<usize, Errno> {
        let handle = lock(&self.files).get(&Arc::as_ptr(&op.file).addr()).and_then(Weak::upgrade);
        let (Some(handle), [memory]) = (handle, &op.pieces[..]) else { return Err(Errno::BADF) };
        let Device::Cuda { index } = memory.device() else { return Err(Errno::INVAL) };
        let device = self.gpus.get(index).map_err(|_| Errno::NODEV)?;
        // SAFETY: the op holds the memory, which is contiguous on that device; requests that use the same memory at the
        // same time are their caller's to order.
        let moved = unsafe {
            match op.kind {
                OpKind::Read => handle.read(&device, memory.addr(), memory.len(), op.offset),
                _ => handle.write(&device, memory.addr(), memory.len(), op.offset),
            }
        };
        moved.map_err(|error| {
            let errno = errno_of(&error);
            *lock(&self.refusal) = Some(error.to_string());
            errno
        })
    }
}

/// The kernel's own number, or one that says whether the same could go another way.
fn errno_of(error: &IoError) -> Errno {
    match error {
        IoError::Kernel(errno) => Errno::from_raw_os_error(*errno),
        IoError::CuFile(..) => Errno::OPNOTSUPP,
        IoError::Device(_) => Errno::IO,
    }
}

/// Another backend, and cuFile beside it.
pub(crate) struct GdsBackend {
    // Dropped first: it waits for what cuFile still does.
    pool: Pool,
    main: Box<dyn Backend>,
    collected: Vec<Op>,
    in_flight: u32,
}

impl GdsBackend {
    pub(crate) fn new(main: Box<dyn Backend>, setup: &BackendSetup, gds: &Arc<Gds>) -> Self {
        let gds = Arc::clone(gds);
        let perform: Perform = Box::new(move |op| gds.perform(op));
        let pool = Pool::new(setup.worker_index, THREADS_MAX.min(setup.queue_depth), perform, Some(main.waker()));
        Self { pool, main, collected: Vec::new(), in_flight: 0 }
    }

    fn take_done(&mut self, completions: &mut Vec<Completion>) -> bool {
        let before = completions.len();
        self.pool.shared().take_done(0, completions);
        let done = completions.len() - before;
        self.in_flight -= done as u32;
        done > 0
    }
}

impl Backend for GdsBackend {
    fn kind(&self) -> BackendKind {
        self.main.kind()
    }

    fn depth(&self) -> u32 {
        self.main.depth()
    }

    fn in_flight(&self) -> u32 {
        self.main.in_flight() + self.in_flight
    }

    fn submit(&mut self, op: Op) -> Submit {
        if op.pieces.first().is_none_or(|memory| memory.device() == Device::Host) {
            return self.main.submit(op);
        }
        if self.in_flight >= self.depth() {
            return Submit::Busy(op);
        }
        self.in_flight += 1;
        self.collected.push(op);
        Submit::Queued
    }

    fn flush(&mut self) -> Result<()> {
        self.pool.run(&mut self.collected);
        self.main.flush()
    }

    fn reap(&mut self, min: u32, completions: &mut Vec<Completion>) -> Result<()> {
        self.pool.run(&mut self.collected);
        // A transfer that ends from here on wakes the other backend, also before it has begun to wait.
        let min = if self.take_done(completions) { 0 } else { min };
        self.main.reap(min, completions)?;
        self.take_done(completions);
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.main.waker()
    }

    fn register(&mut self, memory: &deepnvme_mem::Region) -> bool {
        self.main.register(memory)
    }

    fn unregister(&mut self, memory: &deepnvme_mem::Region) {
        self.main.unregister(memory);
    }
}

impl Drop for GdsBackend {
    fn drop(&mut self) {
        self.pool.run(&mut self.collected);
    }
}
