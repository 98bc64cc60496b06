//! A swapper behaves like a map from keys to bytes, whatever the calls.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::time::Duration;

use deepnvme_io::mem::{Buffer, Region};
use deepnvme_swap::{Error, FileRange};
use deepnvme_testkit::faults::FaultPlan;
use deepnvme_testkit::watchdog::with_time_limit;
use proptest::prelude::*;

use crate::common::{LIMIT, World, change, engine, faulty, never, random, read, world};

#[derive(Clone, Debug)]
enum Call {
    Put(usize, usize),
    Change(usize),
    Read(usize),
    BorrowUnchanged(usize),
    Delete(usize),
    ReadAt(usize, usize, usize),
    WriteAt(usize, usize, usize),
    Prefetch(Vec<usize>),
    Schedule(Vec<usize>),
    Flush,
    Export(usize),
    Import(usize, usize),
}

fn call() -> impl Strategy<Value = Call> {
    let key = 0_usize..8;
    prop_oneof![
        4 => (key.clone(), 0_usize..40_000).prop_map(|(key, bytes)| Call::Put(key, bytes)),
        4 => key.clone().prop_map(Call::Change),
        4 => key.clone().prop_map(Call::Read),
        1 => key.clone().prop_map(Call::BorrowUnchanged),
        1 => key.clone().prop_map(Call::Delete),
        3 => (key.clone(), any::<usize>(), any::<usize>()).prop_map(|(key, from, bytes)| Call::ReadAt(key, from, bytes)),
        3 => (key.clone(), any::<usize>(), any::<usize>()).prop_map(|(key, from, bytes)| Call::WriteAt(key, from, bytes)),
        1 => prop::collection::vec(key.clone(), 0..5).prop_map(Call::Prefetch),
        1 => prop::collection::vec(key.clone(), 0..12).prop_map(Call::Schedule),
        1 => Just(Call::Flush),
        1 => key.clone().prop_map(Call::Export),
        1 => (key, 0_usize..30_000).prop_map(|(key, bytes)| Call::Import(key, bytes)),
    ]
}

/// Turns random numbers into a range of `len` bytes.
fn range_within(len: usize, from: usize, bytes: usize) -> std::ops::Range<usize> {
    let from = from % (len + 1);
    from..from + bytes % (len - from + 1)
}

/// Makes the calls to a swapper and to a map, and compares the results.
fn run(world: &World, calls: Vec<Call>) {
    let swapper = &world.swapper;
    let mut model: HashMap<String, Vec<u8>> = HashMap::new();
    for (index, call) in calls.into_iter().enumerate() {
        let seed = index as u64;
        match call {
            Call::Put(key, bytes) => {
                let data = random(seed, bytes);
                swapper.put(&key.to_string(), &Region::from_vec(data.clone())).unwrap();
                model.insert(key.to_string(), data);
            }
            Call::Change(key) => {
                if let Some(data) = model.get_mut(&key.to_string()) {
                    *data = random(seed, data.len());
                    change(swapper, &key.to_string(), data);
                }
            }
            Call::Read(key) => {
                let key = key.to_string();
                match model.get(&key) {
                    Some(data) => assert!(read(swapper, &key) == *data, "{key} in call {index}"),
                    None => assert!(matches!(swapper.borrow(&key, false, &mut never()), Err(Error::NotFound { .. }))),
                }
            }
            Call::BorrowUnchanged(key) => {
                if model.contains_key(&key.to_string()) {
                    swapper.borrow(&key.to_string(), true, &mut never()).unwrap().mark_clean();
                }
            }
            Call::Delete(key) => {
                let exists = model.remove(&key.to_string()).is_some();
                assert_eq!(swapper.delete(&key.to_string()).is_ok(), exists);
            }
            Call::ReadAt(key, from, bytes) => {
                if let Some(data) = model.get(&key.to_string()) {
                    let range = range_within(data.len(), from, bytes);
                    let out = Buffer::zeroed(range.len()).unwrap().into_region();
                    let seen = out.region();
                    let borrowed = swapper.access(&key.to_string(), false, &mut never()).unwrap();
                    borrowed.read_at(range.start, out, &mut never()).unwrap();
                    let mut found = vec![0; range.len()];
                    seen.copy_to_slice(0, &mut found);
                    assert!(found == data[range]);
                }
            }
            Call::WriteAt(key, from, bytes) => {
                if let Some(data) = model.get_mut(&key.to_string()) {
                    let range = range_within(data.len(), from, bytes);
                    data[range.clone()].copy_from_slice(&random(seed, range.len()));
                    let borrowed = swapper.access(&key.to_string(), true, &mut never()).unwrap();
                    borrowed
                        .write_at(range.start, &Region::from_vec(data[range.clone()].to_vec()), &mut never())
                        .unwrap();
                }
            }
            Call::Prefetch(keys) => {
                let keys: Vec<String> = keys.iter().map(usize::to_string).collect();
                let exist = keys.iter().all(|key| model.contains_key(key));
                assert_eq!(swapper.prefetch(keys.iter().map(String::as_str)).is_ok(), exist);
            }
            Call::Schedule(keys) => {
                let keys: Vec<String> = keys.iter().map(usize::to_string).collect();
                swapper.schedule(keys.iter().map(String::as_str), index % 2 == 0).unwrap();
            }
            Call::Flush => swapper.flush(None, &mut never()).unwrap(),
            Call::Export(key) => {
                if let Some(data) = model.get(&key.to_string()) {
                    let path = world.folder.path().join("export");
                    let file = std::fs::File::create(&path).unwrap();
                    let at = [0, 4096, 77][index % 3];
                    let copied = swapper.export(&key.to_string(), file.as_fd(), at, &mut never()).unwrap();
                    assert_eq!(copied.shared_bytes + copied.kernel_bytes + copied.memory_bytes, data.len() as u64);
                    let found = std::fs::read(&path).unwrap();
                    assert!(found.get(at as usize..).unwrap_or_default() == *data);
                }
            }
            Call::Import(key, bytes) => {
                let path = world.folder.path().join("import");
                let data = random(seed, bytes + 100);
                std::fs::write(&path, &data).unwrap();
                let file = std::fs::File::open(&path).unwrap();
                let range = FileRange { file: file.as_fd(), offset: 100, bytes };
                swapper.import(&key.to_string(), "", &range, &mut never()).unwrap();
                model.insert(key.to_string(), data[100..].to_vec());
            }
        }
        let stats = swapper.stats();
        assert!(stats.resident_bytes_peak <= stats.memory_bytes);
        assert_eq!(stats.items, model.len() as u64);
    }
    for (key, data) in &model {
        assert!(read(swapper, key) == *data, "{key} at the end");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn it_behaves_like_a_map(calls in prop::collection::vec(call(), 1..70), pages in 10_usize..30, has_checksums: bool, prefetch in 0_usize..20, headroom in 0_usize..20) {
        with_time_limit("it_behaves_like_a_map", LIMIT, || {
            let world = world(engine(), pages * 4096, |options| {
                options.has_checksums = has_checksums;
                options.prefetch_bytes = Some(prefetch * 4096);
                options.headroom_bytes = Some(headroom * 4096);
            });
            run(&world, calls);
        });
    }

    /// The engine hides short and interrupted transfers, and completions in any order.
    #[test]
    fn short_and_interrupted_transfers_change_nothing(calls in prop::collection::vec(call(), 1..40), seed: u64) {
        with_time_limit("short_and_interrupted_transfers_change_nothing", LIMIT, || {
            let plan = FaultPlan { seed, short: 200, eintr: 50, eagain: 50, reorder: true, slow: 100, slow_max: Duration::from_millis(2), ..FaultPlan::default() };
            run(&world(faulty(plan).0, 14 * 4096, |_| {}), calls);
        });
    }
}
