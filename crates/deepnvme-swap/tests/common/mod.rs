//! Swappers over folders of their own, and the bytes of items.
#![allow(dead_code, reason = "every test binary uses its own part")]

use std::sync::Arc;
use std::time::Duration;

use deepnvme_io::backend::BackendKind;
use deepnvme_io::{BackendFactory, Config, Engine};
use deepnvme_swap::{Borrowed, Swapper, SwapperOptions};
use deepnvme_testkit::faults::{FaultPlan, Faults};

pub(crate) const KIB: usize = 1 << 10;
/// Time limit of a test.
pub(crate) const LIMIT: Duration = Duration::from_secs(240);

pub(crate) fn engine() -> Arc<Engine> {
    Arc::new(Engine::new(Config { workers: 2, block_bytes: 16 << 10, ..Config::default() }).unwrap())
}

pub(crate) fn faulty(plan: FaultPlan) -> (Arc<Engine>, Faults) {
    let faults = Faults::new(plan);
    let wrap = faults.clone();
    let factory: BackendFactory =
        Arc::new(move |setup| Ok(Box::new(wrap.wrap(deepnvme_io::backend::open(BackendKind::Threads, setup)?))));
    let config = Config { workers: 2, block_bytes: 16 << 10, ..Config::default() };
    (Arc::new(Engine::with_backends(config, factory).unwrap()), faults)
}

pub(crate) fn random(seed: u64, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    let mut rng = deepnvme_testkit::rng::Rng::keyed(seed, &[bytes as u64]);
    for chunk in data.chunks_mut(8) {
        let word = rng.below(u64::MAX).to_ne_bytes();
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
    data
}

pub(crate) fn never() -> impl FnMut() -> bool {
    || false
}

pub(crate) fn bytes_of(borrowed: &Borrowed) -> Vec<u8> {
    let mut bytes = vec![0; borrowed.len()];
    borrowed.region().copy_to_slice(0, &mut bytes);
    bytes
}

pub(crate) fn read(swapper: &Swapper, key: &str) -> Vec<u8> {
    bytes_of(&swapper.borrow(key, false, &mut never()).unwrap())
}

pub(crate) fn change(swapper: &Swapper, key: &str, data: &[u8]) {
    swapper.borrow(key, true, &mut never()).unwrap().target().copy_from_slice(0, data);
}

pub(crate) struct World {
    pub(crate) swapper: Arc<Swapper>,
    pub(crate) folder: tempfile::TempDir,
}

pub(crate) fn world(engine: Arc<Engine>, memory_bytes: usize, adjust: impl FnOnce(&mut SwapperOptions)) -> World {
    let folder = tempfile::tempdir().unwrap();
    let mut options = SwapperOptions::new(folder.path(), memory_bytes);
    adjust(&mut options);
    World { swapper: Arc::new(Swapper::new(engine, &options).unwrap()), folder }
}
