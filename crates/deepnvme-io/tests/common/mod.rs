//! Shared helpers of the engine's integration tests: backends by name, lanes of a program, and visible skips.
#![allow(dead_code, unused_imports, reason = "every test binary uses its own part")]
#![allow(clippy::expect_used, clippy::panic, reason = "these are tests")]

pub(crate) mod mounts;
pub(crate) mod place;
pub(crate) mod program_run;
pub(crate) mod storm;

use std::path::Path;
use std::sync::Arc;

use deepnvme_io::backend::{self, Backend, BackendKind, BackendSetup};
use deepnvme_io::{
    Access, BackendFactory, Config, DirectMode, DirectState, Engine, OpenOptions, SubmitMode, TensorFile,
};
use deepnvme_testkit::faults::{FaultPlan, Faults};
use deepnvme_testkit::scheduled_backend::SimDisk;
use deepnvme_testkit::skips::left_out;
pub(crate) use deepnvme_testkit::skips::skipped;

/// The backends of production use.
pub(crate) const REAL_BACKENDS: [BackendKind; 3] = [BackendKind::Uring, BackendKind::Aio, BackendKind::Threads];

/// A constructor of backends.
pub(crate) type MakeBackend = Box<dyn Fn(&BackendSetup) -> Box<dyn Backend> + Send + Sync>;

/// Returns the available items of a list and reports the missing ones. The test is skipped if all are missing.
pub(crate) fn available<T>(wanted: impl IntoIterator<Item = Result<T, String>>) -> Vec<T> {
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for one in wanted {
        match one {
            Ok(one) => found.push(one),
            Err(why) => missing.push(why),
        }
    }
    if found.is_empty() && !missing.is_empty() {
        skipped(&missing.join("; "));
    } else {
        missing.iter().for_each(|why| left_out(why));
    }
    found
}

/// Returns why a real backend does not work on this machine, if so.
pub(crate) fn unavailable(kind: BackendKind) -> Option<String> {
    let setup = BackendSetup { queue_depth: 1, submit: SubmitMode::Batch, worker_index: 0 };
    backend::open(kind, &setup).err().map(|error| error.to_string())
}

/// Returns the constructor of a real backend, or why it does not work here.
pub(crate) fn try_real(kind: BackendKind) -> Result<MakeBackend, String> {
    match unavailable(kind) {
        Some(reason) => Err(format!("{} does not work here: {reason}", kind.name())),
        None => Ok(Box::new(move |setup| backend::open(kind, setup).expect("it has just worked"))),
    }
}

/// Returns the constructor of a real backend, or reports the skip and returns `None`.
pub(crate) fn real(kind: BackendKind) -> Option<MakeBackend> {
    try_real(kind).map_err(|why| skipped(&why)).ok()
}

/// Returns the real backends that work here, by kind.
pub(crate) fn all_real() -> Vec<(BackendKind, MakeBackend)> {
    available(REAL_BACKENDS.map(|kind| try_real(kind).map(|make| (kind, make))))
}

/// Creates a simulated backend with the schedule of a seed.
pub(crate) fn simulated_by(seed: u64) -> Option<MakeBackend> {
    let make_real = real(BackendKind::Threads)?;
    let disk = SimDisk::new(seed);
    Some(Box::new(move |setup| Box::new(disk.backend(setup, make_real(setup)))))
}

/// Creates a real backend with faults.
pub(crate) fn decorated(kind: BackendKind, faults: &Faults) -> Option<MakeBackend> {
    let (inner, faults) = (real(kind)?, faults.clone());
    Some(Box::new(move |setup| Box::new(faults.wrap(inner(setup)))))
}

/// Returns faults that an engine hides: short transfers, interruptions, temporary refusals, reordered completions.
pub(crate) fn hidden_faults(seed: u64) -> FaultPlan {
    FaultPlan { seed, short: 200, eintr: 50, eagain: 50, reorder: true, ..FaultPlan::default() }
}

/// Creates an engine over the test's backends.
pub(crate) fn engine(config: Config, make: MakeBackend) -> Engine {
    let factory: BackendFactory = Arc::new(move |setup| Ok(make(setup)));
    Engine::with_backends(config, factory).expect("an engine over a backend that works")
}

/// Settings small enough that short programs fill the queues and use all bounce buffers.
pub(crate) fn small_config(workers: u32, submit: SubmitMode) -> Config {
    let block_bytes = 32 << 10;
    let pool_bytes = Some(u64::from(workers) * block_bytes * 3);
    Config { workers, queue_depth: 8, block_bytes, submit, pool_bytes, ..Config::default() }
}

/// Opens a file for both directions, and creates it if it is missing.
pub(crate) fn open(path: &Path, direct: DirectMode) -> deepnvme_io::Result<Arc<TensorFile>> {
    TensorFile::open(path, OpenOptions { access: Access::ReadWrite, create: true, direct })
}

/// Returns whether files of the test folder support direct I/O.
pub(crate) fn direct_works() -> bool {
    let file = deepnvme_testkit::data::TestFile::holding(&[7; 4096]);
    match open(&file.path, DirectMode::Preferred).expect("the test file").direct() {
        DirectState::Direct { .. } => true,
        DirectState::Buffered { reason } => {
            skipped(&format!("{} has no direct I/O: {reason}", file.dir().display()));
            false
        }
    }
}
