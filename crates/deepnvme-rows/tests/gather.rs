//! Gathers of random rows equal those of a table in memory, also with other threads, after errors, and with little
//! memory.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use deepnvme_codec::{Float, cast};
use deepnvme_file::{StripeSet, Target, VersionedFile};
use deepnvme_io::Engine;
use deepnvme_io::mem::{Buffer, RegionMut};
use deepnvme_rows::{BackgroundStore, Conversion, Element, Error, PendingGather, RowRange, RowStore, Table};
use deepnvme_testkit::faults::FaultPlan;
use proptest::prelude::*;

use crate::common::{Model, engine, faulty_engine, folder, gather, gather_as, rows_of};

#[test]
fn rows_in_any_order() {
    let model = Model::new(160, &[1000, 0, 300, 1], 1);
    let store = model.open(&engine(), 1 << 20).unwrap();
    let rows = [1300, 0, 999, 1000, 5, 5, 5, 1299, 0];
    assert_eq!(gather(&store, &rows).unwrap(), model.expected(&rows));
    let stats = store.stats();
    assert_eq!((stats.rows, stats.hits, stats.rows_read), (9, 0, 6));
    assert_eq!(gather(&store, &rows).unwrap(), model.expected(&rows));
    assert_eq!((store.stats().hits, store.stats().rows_read), (9, 6));
    assert!(gather(&store, &[]).unwrap().is_empty());
}

#[test]
fn neighbours_are_one_read() {
    let model = Model::new(64, &[4096], 2);
    let store = model.open(&engine(), 1 << 20).unwrap();
    let rows: Vec<u64> = (100..110).collect();
    gather(&store, &rows).unwrap();
    assert_eq!((store.stats().reads, store.stats().rows_joined), (1, 9));
    assert!(store.stats().bytes_read <= 8192);
}

#[test]
fn no_memory_for_a_cache() {
    for row_bytes in [1, 160, 4096, 17_920] {
        let model = Model::new(row_bytes, &[50], 3);
        let Err(Error::Memory { bytes_min, .. }) = model.open(&engine(), 100) else { panic!("100 bytes are enough") };
        let store = model.open(&engine(), bytes_min).unwrap();
        assert!(store.memory_bytes() <= bytes_min);
        let rows: Vec<u64> = (0..50).rev().chain(0..50).collect();
        assert_eq!(gather(&store, &rows).unwrap(), model.expected(&rows));
        assert!(model.open(&engine(), bytes_min - 1).is_err());
    }
}

#[test]
fn stripe_sets() {
    let (folder, engine) = (folder(), engine());
    let parts = [folder.path().join("a"), folder.path().join("b")];
    let set = StripeSet::new(parts.to_vec(), 8192).unwrap();
    let mut bytes = vec![0; 300_000];
    fastrand::Rng::with_seed(4).fill(&mut bytes);
    let target = Target::Stripes(set);
    let mut writer =
        deepnvme_file::FileWriter::create(Arc::clone(&engine), &target, deepnvme_io::Durability::None).unwrap();
    writer.write(&bytes).unwrap();
    writer.commit().unwrap();
    let table = Table::new(vec![RowRange { file: 0, offset: 0, rows: 1000 }], 300).unwrap();
    let store = RowStore::new(engine, vec![VersionedFile::open(target).unwrap()], table, None, 1 << 20).unwrap();
    let rows: Vec<u64> = (0..1000).step_by(7).collect();
    assert_eq!(gather(&store, &rows).unwrap(), rows_of(&bytes, 300, &rows));
}

#[test]
fn conversions_round_once() {
    let model = Model::new(64, &[100], 5);
    let store = model.open(&engine(), 1 << 16).unwrap();
    let rows = [3, 99, 3, 0];
    let stored = model.expected(&rows);
    for (from, to) in [(Float::Bf16, Float::F32), (Float::F16, Float::Bf16), (Float::F32, Float::F16)] {
        let mut wide = vec![0; stored.len() / from.bytes() * 4];
        cast::convert(from, Float::F32, &stored, &mut wide).unwrap();
        for scale in [None, Some(0.125), Some(45.254_834)] {
            let conversion = Conversion { from: Element::Float(from), to, scale };
            let mut expected = vec![0; conversion.bytes(stored.len())];
            let mut scaled = wide.clone();
            for element in scaled.as_chunks_mut().0 {
                *element = (f32::from_le_bytes(*element) * scale.unwrap_or(1.0)).to_le_bytes();
            }
            if scale.is_none() {
                cast::convert(from, to, &stored, &mut expected).unwrap();
            } else {
                cast::convert(Float::F32, to, &scaled, &mut expected).unwrap();
            }
            assert_eq!(gather_as(&store, &rows, Some(conversion), expected.len()).unwrap(), expected);
        }
    }
}

#[test]
fn wrong_calls_are_refused() {
    let model = Model::new(10, &[20], 6);
    let store = model.open(&engine(), 1 << 16).unwrap();
    let error = gather(&store, &[0, 20, 30]).unwrap_err();
    assert!(matches!(error, Error::NoSuchRow { id: 20, position: 1, rows: 20 }), "{error}");
    assert!(matches!(gather_as(&store, &[0, 1], None, 19), Err(Error::Invalid(_))));
    assert!(store.prefetch(&[20], None, &|| false).is_err());
    store.close();
    assert!(matches!(gather(&store, &[0]), Err(Error::Closed)));
    assert!(matches!(store.prefetch(&[0], None, &|| false), Err(Error::Closed)));
}

#[test]
fn files_that_are_too_short_are_refused() {
    let mut model = Model::new(10, &[20], 7);
    model.ranges[0].rows = 21;
    let error = model.open(&engine(), 1 << 16).unwrap_err().to_string();
    assert!(error.contains("0.bin") && error.contains("ends too early"), "{error}");
    model.ranges[0].file = 1;
    assert!(matches!(model.open(&engine(), 1 << 16), Err(Error::Invalid(_))));
}

#[test]
fn changed_files_are_noticed_and_nothing_of_them_is_kept() {
    let model = Model::new(100, &[1000, 1000], 8);
    let store = model.open(&engine(), 1 << 20).unwrap();
    gather(&store, &[1]).unwrap();
    let mut bytes = fs::read(&model.paths[1]).unwrap();
    let original = bytes.clone();
    bytes.iter_mut().for_each(|byte| *byte = !*byte);
    fs::write(&model.paths[1], &bytes).unwrap();
    assert!(matches!(gather(&store, &[1500]), Err(Error::Changed { .. })));
    // The other file is as it was, and so are rows in memory.
    assert_eq!(gather(&store, &[1, 7]).unwrap(), model.expected(&[1, 7]));
    fs::write(&model.paths[1], original).unwrap();
    assert!(matches!(gather(&store, &[1500]), Err(Error::Changed { .. })), "its time has changed");
    fs::File::options().write(true).open(&model.paths[0]).unwrap().set_len(5000).unwrap();
    assert!(gather(&store, &[900]).is_err());
}

#[test]
fn prefetched_rows_are_hits() {
    let model = Model::new(128, &[5000], 9);
    let store = model.open(&engine(), 1 << 20).unwrap();
    let rows: Vec<u64> = (0..5000).step_by(9).collect();
    store.prefetch(&rows, None, &|| false).unwrap();
    assert_eq!(store.stats().rows_prefetched, rows.len() as u64);
    assert_eq!(gather(&store, &rows).unwrap(), model.expected(&rows));
    assert_eq!(store.stats().hits, rows.len() as u64);
    let late = Some(std::time::Instant::now() - Duration::from_secs(1));
    store.prefetch(&[1, 2], late, &|| false).unwrap();
    assert_eq!((store.stats().rows_not_prefetched, store.stats().rows_prefetched), (2, rows.len() as u64));
}

#[test]
fn kept_rows_stay() {
    let model = Model::new(128, &[20_000], 18);
    let store = model.open(&engine(), 1 << 20).unwrap();
    let kept: Vec<u64> = (0..20_000).step_by(11).collect();
    // One of them is in memory before.
    gather(&store, &[11]).unwrap();
    store.keep(&kept, &|| false).unwrap();
    store.keep(&kept[..10], &|| false).unwrap();
    gather(&store, &(0..20_000).collect::<Vec<_>>()).unwrap();
    let before = store.stats();
    assert_eq!(gather(&store, &kept).unwrap(), model.expected(&kept));
    assert_eq!(store.stats().hits - before.hits, kept.len() as u64);
    let error = store.keep(&(0..9_000).collect::<Vec<_>>(), &|| false).unwrap_err().to_string();
    assert!(error.contains("cannot be kept") && error.contains("use more memory"), "{error}");
    let error = store.keep(&(0..20_000).collect::<Vec<_>>(), &|| false).unwrap_err().to_string();
    assert!(error.ends_with("at most half of the table can be kept"), "more memory does not help: {error}");
    let error = model.open(&engine(), 16 << 20).unwrap().keep(&(0..20_000).collect::<Vec<_>>(), &|| false).unwrap_err();
    assert!(error.to_string().contains("room for 10"), "{error}");
    assert!(error.to_string().ends_with("at most half of the table can be kept"), "{error}");
    // Rows that are not kept still find room.
    store.prefetch(&[1, 2, 3], None, &|| false).unwrap();
    assert_eq!(store.stats().rows_not_prefetched, 0);
}

#[test]
fn failed_reads_are_errors_and_the_next_try_may_succeed() {
    let model = Model::new(160, &[3000], 10);
    let mut random = fastrand::Rng::with_seed(10);
    let plan = FaultPlan { seed: 10, eio: 50, short: 200, eintr: 50, reorder: true, ..FaultPlan::default() };
    let store = model.open(&faulty_engine(plan), 200_000).unwrap();
    let (mut failed, mut succeeded) = (0, 0);
    for _ in 0..300 {
        let rows: Vec<u64> = (0..random.usize(1..20)).map(|_| random.u64(0..model.rows())).collect();
        match gather(&store, &rows) {
            Ok(bytes) => {
                assert_eq!(bytes, model.expected(&rows));
                succeeded += 1;
            }
            Err(error) => {
                assert!(error.to_string().contains("0.bin"), "{error}");
                failed += 1;
            }
        }
    }
    assert!(failed > 10 && succeeded > 10, "{failed} failed, {succeeded} succeeded");
}

#[test]
fn threads_share_a_store() {
    let model = Model::new(200, &[2000, 2000], 11);
    let store = model.open(&engine(), 400_000).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..20 {
            let (model, store) = (&model, &store);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(thread);
                for turn in 0..40 {
                    let hot = random.bool();
                    let rows: Vec<u64> = (0..random.usize(1..300))
                        .map(|_| random.u64(0..if hot { 400 } else { model.rows() }))
                        .collect();
                    if turn % 5 == 4 {
                        store.prefetch(&rows, None, &|| false).unwrap();
                    } else {
                        assert!(gather(store, &rows).unwrap() == model.expected(&rows), "thread {thread}, turn {turn}");
                    }
                }
            });
        }
    });
}

#[test]
fn interrupted_gathers_leave_nothing_behind() {
    let model = Model::new(4000, &[2000], 12);
    let store = model.open(&engine(), 1 << 20).unwrap();
    let rows: Vec<u64> = (0..2000).collect();
    let asked = AtomicU64::new(0);
    let target = Buffer::zeroed(rows.len() * 4000).unwrap().into_region();
    // The stop comes at any moment, or not at all.
    for stop_after in 0..6 {
        asked.store(0, Ordering::Relaxed);
        let stopped = AtomicBool::new(false);
        let should_stop = || {
            let stops = asked.fetch_add(1, Ordering::Relaxed) >= stop_after;
            stopped.fetch_or(stops, Ordering::Relaxed);
            stops
        };
        match store.gather(&rows, &target, None, &should_stop) {
            Err(Error::Interrupted) => assert!(stopped.load(Ordering::Relaxed)),
            result => result.unwrap(),
        }
    }
    assert_eq!(gather(&store, &rows).unwrap(), model.expected(&rows));
}

fn start(store: &BackgroundStore, rows: &[u64]) -> (PendingGather, RegionMut) {
    let (target, view) = shared_memory(rows.len() * store.store().table().row_bytes());
    (store.start_gather(rows.to_vec(), target, None).unwrap(), view)
}

/// Memory for a gather, and a view to read it by.
fn shared_memory(bytes: usize) -> (RegionMut, RegionMut) {
    let arena = deepnvme_io::mem::Arena::new(bytes.max(1), false).unwrap();
    (arena.region_mut(0..bytes), arena.region_mut(0..bytes))
}

fn content(view: &RegionMut) -> Vec<u8> {
    let mut bytes = vec![0; view.len()];
    view.region().copy_to_slice(0, &mut bytes);
    bytes
}

/// A table of 4000 rows, and a store with memory for few of them.
fn background_store(seed: u64) -> (Model, BackgroundStore, fastrand::Rng) {
    let model = Model::new(3000, &[4000], seed);
    let store = BackgroundStore::new(model.open(&engine(), 1 << 20).unwrap());
    (model, store, fastrand::Rng::with_seed(seed))
}

#[test]
fn gathers_in_the_background() {
    let (model, store, mut random) = background_store(13);
    for turn in 0..30 {
        let wanted: Vec<Vec<u64>> =
            (0..5).map(|_| (0..random.usize(0..400)).map(|_| random.u64(0..model.rows())).collect()).collect();
        let started: Vec<_> = wanted.iter().map(|rows| start(&store, rows)).collect();
        for (rows, (pending, view)) in wanted.iter().zip(&started) {
            if turn % 2 == 0 {
                assert!(pending.wait(Some(Duration::from_secs(60)), &|| false).unwrap());
            } else {
                assert!(pending.wait(None, &|| false).unwrap());
            }
            pending.result().expect("it is done").unwrap();
            assert!(content(view) == model.expected(rows));
        }
    }
}

/// Gathers that no thread runs yet hold buffers. They take those that others return, and must not take all.
#[test]
fn more_gathers_than_buffers() {
    let (model, store, mut random) = background_store(17);
    for round in 0..10 {
        let mut rows_of = |rows| (0..150).map(|_| random.u64(0..rows)).collect();
        let wanted: Vec<Vec<u64>> = (0..20).map(|gather| rows_of(if gather % 2 == 0 { 900 } else { 4000 })).collect();
        let start_later = |rows: &Vec<u64>| {
            std::thread::sleep(Duration::from_micros(40 * round));
            start(&store, rows)
        };
        let started: Vec<_> = wanted.iter().map(start_later).collect();
        for (rows, (pending, view)) in wanted.iter().zip(&started) {
            assert!(pending.wait(Some(Duration::from_secs(60)), &|| false).unwrap(), "it hangs");
            pending.result().expect("it is done").unwrap();
            assert!(content(view) == model.expected(rows));
        }
    }
}

fn far_more_rows_than_memory() -> (Model, BackgroundStore, Vec<u64>) {
    let model = Model::new(4096, &[3000], 14);
    let store = BackgroundStore::new(model.open(&engine(), 1 << 19).unwrap());
    (model, store, (0..3000).collect())
}

#[test]
fn a_stopped_wait_leaves_the_gather_in_flight() {
    let (model, store, rows) = far_more_rows_than_memory();
    for _ in 0..5 {
        let (pending, view) = start(&store, &rows);
        while !pending.wait(None, &|| true).unwrap() {}
        pending.result().expect("it is done").unwrap();
        assert!(content(&view) == model.expected(&rows));
    }
}

#[test]
fn a_gather_that_returns_to_the_queue_after_a_close_ends() {
    let large: Vec<u64> = (0..3000).cycle().take(60_000).collect();
    for _ in 0..3 {
        // The table's thread does the first. This one begins with the second, and gives it back when that thread is gone.
        let (_model, store, rows) = far_more_rows_than_memory();
        let (first, _) = start(&store, &rows);
        let (second, _) = start(&store, &large);
        store.close();
        let ended = std::cell::Cell::new(None);
        let is_gone = || {
            if first.is_done() && ended.get().is_none() {
                ended.set(Some(std::time::Instant::now()));
            }
            ended.get().is_some_and(|at| at.elapsed() > Duration::from_millis(50))
        };
        if !second.wait(None, &is_gone).unwrap() {
            assert!(second.wait(Some(Duration::from_secs(60)), &|| false).unwrap(), "nobody does it");
        }
        assert!(matches!(second.result(), Some(Ok(()) | Err(Error::Closed))));
    }
}

#[test]
fn gathers_that_are_started_during_a_close_end() {
    let model = Model::new(64, &[900], 19);
    for turn in 0..200 {
        let store = BackgroundStore::new(model.open(&engine(), 1 << 16).unwrap());
        let rows: Vec<u64> = (0..300).collect();
        // The table's thread runs.
        let (first, _) = start(&store, &rows);
        assert!(first.wait(Some(Duration::from_secs(60)), &|| false).unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_micros(turn));
                store.close();
            });
            let started = std::iter::from_fn(|| {
                let target = Buffer::zeroed(rows.len() * 64).unwrap().into_region();
                store.start_gather(rows.clone(), target, None).ok()
            });
            for gather in started.collect::<Vec<_>>() {
                assert!(gather.wait(Some(Duration::from_secs(60)), &|| false).unwrap(), "nobody does it");
            }
        });
    }
}

#[test]
fn cancelled_gathers_end_and_buffers_return() {
    let (model, store, rows) = far_more_rows_than_memory();
    for turn in 0..20 {
        let (pending, _view) = start(&store, &rows);
        if turn % 2 == 0 {
            std::thread::sleep(Duration::from_micros(300 * turn));
        }
        pending.cancel();
        assert!(pending.wait(None, &|| false).unwrap());
        assert!(matches!(pending.result(), Some(Ok(()) | Err(Error::Interrupted))));
    }
    let (pending, view) = start(&store, &rows);
    pending.wait(None, &|| false).unwrap();
    assert!(content(&view) == model.expected(&rows));
}

#[test]
fn prefetches_in_the_background() {
    let model = Model::new(128, &[5000], 16);
    let store = BackgroundStore::new(model.open(&engine(), 1 << 20).unwrap());
    let rows: Vec<u64> = (0..2000).collect();
    store.start_prefetch(rows.clone(), None).unwrap();
    assert_eq!(gather(store.store(), &rows).unwrap(), model.expected(&rows));
    let stats = store.store().stats();
    assert!(stats.rows_read < 2300, "rows in flight are not read twice: {stats:?}");
    assert!(store.start_prefetch(vec![5000], None).is_err());
    store.close();
    assert!(matches!(store.start_prefetch(vec![0], None), Err(Error::Closed)));
    let target = Buffer::zeroed(128).unwrap().into_region();
    assert!(matches!(store.start_gather(vec![0], target, None), Err(Error::Closed)));
}

/// One step of a random program.
#[derive(Clone, Debug)]
enum Step {
    Gather(Vec<u64>),
    Prefetch(Vec<u64>),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let rows = || {
        prop_oneof![
            proptest::collection::vec(0_u64..2000, 0..60),
            proptest::collection::vec(0_u64..40, 0..60),
            (0_u64..1900, 0_u64..100).prop_map(|(first, count)| (first..first + count).collect()),
        ]
    };
    proptest::collection::vec(
        prop_oneof![4 => rows().prop_map(Step::Gather), 1 => rows().prop_map(Step::Prefetch)],
        1..12,
    )
}

proptest! {
    #[test]
    fn programs_equal_a_table_in_memory(
        row_bytes in prop_oneof![1_usize..600, 4000_usize..4200, Just(4096_usize), 8000_usize..20_000],
        memory in 0_u64..400_000,
        steps in steps(),
        seed in any::<u64>(),
    ) {
        let model = Model::new(row_bytes, &[700, 300, 1000], seed);
        let store = match model.open(shared_engine(), memory) {
            Ok(store) => store,
            Err(Error::Memory { bytes_min, .. }) => model.open(shared_engine(), bytes_min).unwrap(),
            Err(error) => panic!("{error}"),
        };
        prop_assert!(store.memory_bytes() <= memory.max(4096 * 6));
        for step in steps {
            match step {
                Step::Gather(rows) => prop_assert!(gather(&store, &rows).unwrap() == model.expected(&rows)),
                Step::Prefetch(rows) => store.prefetch(&rows, None, &|| false).unwrap(),
            }
        }
    }
}

fn shared_engine() -> &'static Arc<Engine> {
    static ENGINE: std::sync::OnceLock<Arc<Engine>> = std::sync::OnceLock::new();
    ENGINE.get_or_init(engine)
}
