//! Backends that fail entirely or cannot be created: requests fail, memory returns, and nothing hangs.
#![allow(clippy::expect_used, clippy::panic, reason = "helpers of tests fail like tests")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::{MakeBackend, open, try_real};
use deepnvme_io::backend::{Backend, BackendKind, BackendSetup, Wake};
use deepnvme_io::op::{Completion, Op, Submit};
use deepnvme_io::{Config, DirectMode, Engine, Error, ErrorKind};
use deepnvme_mem::RegionMut;
use deepnvme_testkit::data::{TestFile, random_bytes};
use deepnvme_testkit::watchdog;

const TIME_MAX: Duration = Duration::from_secs(60);
const LEN: usize = 300_000;

/// A backend whose reaps fail after the first `reaps_left`.
struct FailingBackend {
    inner: Box<dyn Backend>,
    reaps_left: u32,
}

impl Backend for FailingBackend {
    fn kind(&self) -> BackendKind {
        BackendKind::Simulated
    }

    fn depth(&self) -> u32 {
        self.inner.depth()
    }

    fn in_flight(&self) -> u32 {
        self.inner.in_flight()
    }

    fn submit(&mut self, op: Op) -> Submit {
        self.inner.submit(op)
    }

    fn flush(&mut self) -> deepnvme_io::Result<()> {
        self.inner.flush()
    }

    fn reap(&mut self, min: u32, completions: &mut Vec<Completion>) -> deepnvme_io::Result<()> {
        if self.reaps_left == 0 {
            return Err(Error::new(ErrorKind::Io, "reap", "the backend has failed"));
        }
        self.reaps_left -= 1;
        self.inner.reap(min, completions)
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.inner.waker()
    }
}

#[test]
fn requests_on_failing_backends_fail_and_never_hang() {
    for (workers, reaps) in [(1, 0), (1, 7), (2, 3), (3, 20)] {
        let name = format!("{workers} backends that fail after {reaps} reaps");
        watchdog::with_time_limit(&name, TIME_MAX, || {
            let file = TestFile::holding(&random_bytes(11, LEN));
            let inner = try_real(BackendKind::Threads).expect("threads work everywhere");
            let make: MakeBackend =
                Box::new(move |setup| Box::new(FailingBackend { inner: inner(setup), reaps_left: reaps }));
            let engine =
                common::engine(Config { workers, queue_depth: 6, block_bytes: 16 << 10, ..Config::default() }, make);
            let target = open(&file.path, DirectMode::Preferred).expect("the test file");
            let mut failures = 0;
            for round in 0..20 {
                let reads: Vec<_> =
                    (0..10).map(|at| engine.read(&target, at, RegionMut::from_vec(vec![0; 100_000]))).collect();
                for read in reads {
                    // Once every backend has failed, requests may be refused immediately.
                    let Ok(pending) = read else {
                        failures += 1;
                        continue;
                    };
                    let (returned, result) = pending.wait();
                    assert!(returned.is_some(), "{name}, round {round}: memory was not returned");
                    failures += u32::from(result.is_err());
                }
            }
            assert!(failures > 0, "{name}: no request failed");
        });
    }
}

#[test]
fn an_engine_is_not_created_without_one_of_its_backends() {
    let attempts = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&attempts);
    let inner = try_real(BackendKind::Threads).expect("threads work everywhere");
    let factory: deepnvme_io::BackendFactory = Arc::new(move |setup: &BackendSetup| {
        if count.fetch_add(1, Ordering::Relaxed) == 2 {
            return Err(Error::new(ErrorKind::Unsupported, "open", "the third backend is one too many"));
        }
        Ok(inner(setup))
    });
    let config = Config { workers: 4, ..Config::default() };
    let error = Engine::with_backends(config, factory).expect_err("the third backend cannot be created");
    assert!(error.to_string().contains("one too many"), "{error}");
    assert_eq!(attempts.load(Ordering::Relaxed), 3);
}
