//! cuFile combined with a backend keeps the backend contract, with and without batches. Each op of the contract's
//! checks runs on GPU memory instead.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail like tests")]

mod common;
#[path = "gpu/fake_driver.rs"]
mod fake_driver;

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use deepnvme_io::backend::{self, Backend, BackendKind, BackendSetup, Wake};
use deepnvme_io::gpu::GdsAccess;
use deepnvme_io::mem::{Region, RegistrableRange};
use deepnvme_io::op::{Completion, Errno, Op, OpKind, RegisteredFile, Submit, Token};
use deepnvme_io::{Result, SubmitMode};
use deepnvme_testkit::data::TestFile;
use fake_driver::{Gpu, GpuMemory};

/// Returns the fake driver for all backends of a test, with exclusive access.
fn gpu() -> Rc<Gpu> {
    thread_local! {
        static GPU: RefCell<Weak<Gpu>> = const { RefCell::new(Weak::new()) };
    }
    GPU.with_borrow_mut(|known| {
        known.upgrade().unwrap_or_else(|| {
            let gpu = Rc::new(Gpu::new());
            *known = Rc::downgrade(&gpu);
            gpu
        })
    })
}

/// Combines a real backend with cuFile, with or without batches.
fn with_cufile(kind: BackendKind, has_batches: bool) -> Option<common::MakeBackend> {
    if let Some(why) = common::unavailable(kind) {
        common::skipped(&why);
        return None;
    }
    Some(Box::new(move |setup: &BackendSetup| {
        let gpu = gpu();
        if !has_batches {
            gpu.fail_always("cuFileBatchIOSetUp", 5039);
        }
        let access = GdsAccess::new();
        let inner = Some(access.combine(backend::open(kind, setup).unwrap(), setup));
        Box::new(OnGpu { inner, access, moved: HashMap::new(), next: 0, gpu })
    }))
}

/// Replaces the memory of ops with GPU memory.
struct OnGpu {
    /// `None` while it is dropped.
    inner: Option<Box<dyn Backend>>,
    access: GdsAccess,
    /// The original ops and their GPU memory, by the tokens in use.
    moved: HashMap<u64, Moved>,
    next: u64,
    gpu: Rc<Gpu>,
}

struct Moved {
    op: Op,
    memory: Option<(GpuMemory, RegisteredFile)>,
}

impl Drop for OnGpu {
    /// Copies the bytes of reads that the drop has waited for.
    fn drop(&mut self) {
        drop(self.inner.take());
        for Moved { op, memory } in self.moved.values() {
            if let Some((on_gpu, _)) = memory.as_ref().filter(|_| op.kind == OpKind::Read) {
                fill(&op.iovecs[0], &self.gpu.peek(on_gpu));
            }
        }
    }
}

impl OnGpu {
    fn inner(&self) -> &dyn Backend {
        self.inner.as_deref().expect("it is being dropped")
    }

    fn inner_mut(&mut self) -> &mut Box<dyn Backend> {
        self.inner.as_mut().expect("it is being dropped")
    }

    /// Returns the GPU memory for a plain transfer, if cuFile knows its file and the transfer is in whole pages, as
    /// engines require.
    fn stand_in(&self, op: &Op) -> Option<(GpuMemory, RegisteredFile)> {
        let [memory] = &op.iovecs[..] else { return None };
        let is_whole = op.offset.is_multiple_of(4096) && memory.len().is_multiple_of(4096);
        if !matches!(op.kind, OpKind::Read | OpKind::Write) || !is_whole {
            return None;
        }
        let file = self.access.register(&op.file).ok()?;
        let on_gpu = self.gpu.memory(0, memory.len(), 1);
        let mut bytes = vec![0; memory.len()];
        memory.copy_to_slice(0, &mut bytes);
        self.gpu.poke(&on_gpu, &bytes);
        Some((on_gpu, file))
    }

    fn give_back(&mut self, Completion { op, result }: Completion) -> Completion {
        let token = op.token.0;
        drop(op);
        let Moved { op, memory } = self.moved.remove(&token).expect("an op that was submitted");
        if let Some((on_gpu, _)) = memory.filter(|_| op.kind == OpKind::Read) {
            fill(&op.iovecs[0], &self.gpu.peek(&on_gpu));
        }
        Completion { op, result }
    }
}

/// Fills memory as the kernel does.
fn fill(memory: &Region, bytes: &[u8]) {
    assert_eq!(memory.len(), bytes.len());
    let start = std::ptr::with_exposed_provenance_mut(memory.addr());
    // SAFETY: a read of this op may change its memory, which has not been returned yet.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), start, bytes.len()) }
}

impl Backend for OnGpu {
    fn kind(&self) -> BackendKind {
        self.inner().kind()
    }

    fn depth(&self) -> u32 {
        self.inner().depth()
    }

    fn in_flight(&self) -> u32 {
        self.inner().in_flight()
    }

    fn submit(&mut self, op: Op) -> Submit {
        let memory = self.stand_in(&op);
        let iovecs =
            memory.as_ref().map_or_else(|| op.iovecs.clone(), |(memory, _)| [memory.region()].into_iter().collect());
        let cufile = memory.as_ref().map(|(_, file)| file.clone());
        let token = Token(self.next);
        self.next += 1;
        let other = Op { token, kind: op.kind, file: Arc::clone(&op.file), offset: op.offset, iovecs, cufile };
        match self.inner_mut().submit(other) {
            Submit::Queued => {
                self.moved.insert(token.0, Moved { op, memory });
                Submit::Queued
            }
            Submit::Busy(_) => Submit::Busy(op),
        }
    }

    fn flush(&mut self) -> Result<()> {
        self.inner_mut().flush()
    }

    fn reap(&mut self, min: u32, completions: &mut Vec<Completion>) -> Result<()> {
        let mut done = Vec::new();
        self.inner_mut().reap(min, &mut done)?;
        let given: Vec<_> = done.into_iter().map(|completion| self.give_back(completion)).collect();
        completions.extend(given);
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.inner().waker()
    }

    fn register(&mut self, memory: &RegistrableRange) -> bool {
        self.inner_mut().register(memory)
    }

    fn unregister(&mut self, memory: &RegistrableRange) {
        self.inner_mut().unregister(memory);
    }
}

/// Defines a test module per constructor.
macro_rules! backends {
    ($($name:ident: $make:expr;)*) => {
        $(
            mod $name {
                use super::*;

                deepnvme_testkit::conformance_tests!($make);
            }
        )*
    };
}

backends! {
    batches_with_uring: with_cufile(BackendKind::Uring, true);
    batches_with_threads: with_cufile(BackendKind::Threads, true);
    calls_with_uring: with_cufile(BackendKind::Uring, false);
    calls_with_aio: with_cufile(BackendKind::Aio, false);
}

#[test]
fn an_op_never_meets_the_registration_of_another_file() {
    let setup = BackendSetup { queue_depth: 4, submit: SubmitMode::Batch, worker_index: 0 };
    let (gpu, access) = (gpu(), GdsAccess::new());
    let mut backend = access.combine(backend::open(BackendKind::Threads, &setup).unwrap(), &setup);
    let (secret, other) = (TestFile::holding(&[0xAA; 4096]), TestFile::holding(&[0xBB; 4096]));
    let descriptor = |file: &TestFile| Arc::new(OwnedFd::from(File::open(&file.path).unwrap()));
    // Its transfers may continue after all other references to the file are gone.
    let known = access.register(&descriptor(&secret)).unwrap();
    // One of these has the address of the first.
    let files: Vec<_> = (0..200).map(|_| descriptor(&other)).collect();
    for file in files {
        let memory = gpu.memory(0, 4096, 1);
        let iovecs = [memory.region()].into_iter().collect();
        let op = Op { token: Token(0), kind: OpKind::Read, file, offset: 0, iovecs, cufile: None };
        assert!(matches!(backend.submit(op), Submit::Queued));
        let mut done = Vec::new();
        while done.is_empty() {
            backend.reap(1, &mut done).unwrap();
        }
        assert_eq!(done.pop().unwrap().result, Err(Errno::BADF));
    }
    drop(known);
}
