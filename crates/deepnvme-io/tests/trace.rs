//! Recordings contain all of the engine's work exactly once and match its counters, despite failures.
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "helpers of tests fail like tests")]

mod common;

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use common::{all_real, decorated, engine, hidden_faults, open, small_config};
use deepnvme_io::backend::BackendKind;
use deepnvme_io::op::Direction;
use deepnvme_io::trace::{DataPath, EventKind, Recorded, TraceEvent, now_ns};
use deepnvme_io::{
    DirectMode, Durability, Engine, ErrorKind, ReadItem, StatsSnapshot, SubmitMode, WriteItem, WriteOptions,
};
use deepnvme_testkit::data::{TestFile, random_bytes, region_at, region_holding};
use deepnvme_testkit::faults::{FaultPlan, Faults};
use deepnvme_testkit::model::pick_bytes;
use deepnvme_testkit::rng::Rng;

const FILE_BYTES: u64 = 400_000;

/// Reads and writes of any size and offset, alone and in batches, some of them durable. Some precede the recording.
fn work(engine: &Engine, path: &Path, mode: DirectMode, seed: u64, rounds: u64) {
    let file = open(path, mode).expect("the test file");
    let mut rng = Rng::keyed(seed, &[1]);
    for round in 0..rounds {
        let len = pick_bytes(&mut rng, 32 << 10, 150_000) as usize;
        let offset = rng.below(FILE_BYTES - len as u64);
        let skew = rng.below(3) as usize;
        let is_ok = if rng.chance(500) {
            let read = ReadItem { file: Arc::clone(&file), offset, target: region_at(skew, len) };
            engine.read_batch(vec![read]).unwrap().wait().1.is_ok()
        } else {
            let durability = rng.pick(&[Durability::None, Durability::Data, Durability::Full]);
            let source = region_holding(skew, &random_bytes(round, len)).region();
            let options = WriteOptions { durability, ..WriteOptions::default() };
            engine
                .write_batch(vec![WriteItem { file: Arc::clone(&file), offset, source }], options)
                .unwrap()
                .wait()
                .1
                .is_ok()
        };
        assert!(is_ok, "seed {seed}, round {round}");
    }
}

/// Sums of the events, by the names of the counters.
#[derive(Default, PartialEq, Eq, Debug)]
struct Sums {
    requests: u64,
    requests_failed: u64,
    ops: u64,
    syncs_at_least: u64,
}

fn sums(recorded: &Recorded) -> Sums {
    let mut sums = Sums::default();
    for TraceEvent { start_ns, end_ns, kind } in &recorded.events {
        assert!(recorded.start_ns <= *start_ns && start_ns <= end_ns && *end_ns <= recorded.end_ns, "{kind:?}");
        match kind {
            EventKind::Request { failed, .. } => {
                sums.requests += 1;
                sums.requests_failed += u64::from(*failed);
            }
            EventKind::Op { .. } => sums.ops += 1,
            EventKind::Sync { .. } => {
                sums.ops += 1;
                sums.syncs_at_least += 1;
            }
            EventKind::Copy { .. } | EventKind::Span { .. } => {}
        }
    }
    sums
}

fn counted(before: &StatsSnapshot, after: &StatsSnapshot) -> (u64, u64, u64) {
    (after.requests - before.requests, after.requests_failed - before.requests_failed, after.ops - before.ops)
}

#[test]
fn everything_is_there_once_under_every_backend() {
    for (kind, make) in all_real() {
        let engine = engine(small_config(2, SubmitMode::Batch), make);
        for (seed, mode) in [DirectMode::Preferred, DirectMode::Disabled].into_iter().enumerate() {
            let file = TestFile::holding(&random_bytes(seed as u64, FILE_BYTES as usize));
            work(&engine, &file.path, mode, seed as u64, 5);
            let before = engine.stats();
            let recording = engine.record().unwrap();
            work(&engine, &file.path, mode, seed as u64 + 10, 40);
            let recorded = recording.stop().unwrap();
            let after = engine.stats();
            let sums = sums(&recorded);
            assert_eq!((sums.requests, sums.requests_failed, sums.ops), counted(&before, &after), "{kind:?} {mode:?}");
            assert_eq!(sums.syncs_at_least, after.syncs - before.syncs, "{kind:?}: no sync had to be tried again");
            assert_eq!(recorded.dropped, 0);
            work(&engine, &file.path, mode, 99, 3);
            let distinct: HashSet<_> = recorded.events.iter().map(|event| format!("{event:?}")).collect();
            assert_eq!(distinct.len(), recorded.events.len(), "{kind:?}: nothing is there twice");
        }
    }
}

#[test]
fn whole_blocks_say_where_they_went_and_by_which_way() {
    let content = random_bytes(7, 1 << 20);
    let file = TestFile::holding(&content);
    for (kind, make) in all_real() {
        let engine = engine(small_config(2, SubmitMode::Batch), make);
        for (mode, skew) in [(DirectMode::Preferred, 0), (DirectMode::Preferred, 1), (DirectMode::Disabled, 0)] {
            let target = open(&file.path, mode).unwrap();
            let before = engine.stats();
            let recording = engine.record().unwrap();
            engine.read(&target, 0, region_at(skew, content.len())).unwrap().wait().1.unwrap();
            let recorded = recording.stop().unwrap();
            let after = engine.stats();
            let mut places = Vec::new();
            let mut by_way = [0_u64; 4];
            for event in &recorded.events {
                let EventKind::Op { direction, file: path, offset, bytes, data_path, failed, worker } = &event.kind
                else {
                    continue;
                };
                assert_eq!((*direction, *failed, &**path), (Direction::Read, false, &*file.path));
                assert!(worker.is_some_and(|worker| worker < 2));
                places.push((*offset, *bytes));
                by_way[*data_path as usize] += bytes;
            }
            places.sort_unstable();
            let mut at = 0;
            for (offset, bytes) in places {
                assert_eq!(offset, at, "{kind:?} {mode:?}: neither hole nor overlap");
                at += bytes;
            }
            assert_eq!(at, 1 << 20, "{kind:?} {mode:?}");
            let counters = [
                (DataPath::Direct, after.bytes_direct - before.bytes_direct),
                (DataPath::Bounced, after.bytes_bounced - before.bytes_bounced),
                (DataPath::Buffered, after.bytes_buffered - before.bytes_buffered),
                (DataPath::Gds, after.bytes_gds - before.bytes_gds),
            ];
            for (data_path, bytes) in counters {
                assert_eq!(by_way[data_path as usize], bytes, "{kind:?} {mode:?} {skew}: {}", data_path.name());
            }
        }
    }
}

#[test]
fn continued_and_repeated_ops_are_recorded_each_time() {
    for seed in 0..6 {
        let faults = Faults::new(hidden_faults(seed));
        let Some(make) = decorated(BackendKind::Threads, &faults) else { return };
        let engine = engine(small_config(2, SubmitMode::Batch), make);
        let file = TestFile::holding(&random_bytes(seed, FILE_BYTES as usize));
        let before = engine.stats();
        let recording = engine.record().unwrap();
        work(&engine, &file.path, DirectMode::Preferred, seed, 40);
        let recorded = recording.stop().unwrap();
        let after = engine.stats();
        let sums = sums(&recorded);
        assert_eq!((sums.requests, 0, sums.ops), counted(&before, &after), "seed {seed}");
        let refused = recorded.events.iter().filter(|event| {
            matches!(event.kind, EventKind::Op { failed: true, .. } | EventKind::Sync { failed: true, .. })
        });
        assert_eq!(refused.count() as u64, after.retries - before.retries, "seed {seed}");
        assert!(after.retries > before.retries && after.short_ops > before.short_ops, "seed {seed}");
    }
}

#[test]
fn failed_ops_are_recorded_as_failed() {
    let plan = FaultPlan { seed: 3, eio: 300, ..FaultPlan::default() };
    let Some(make) = decorated(BackendKind::Threads, &Faults::new(plan)) else { return };
    let engine = engine(small_config(1, SubmitMode::Batch), make);
    let file = TestFile::holding(&random_bytes(3, FILE_BYTES as usize));
    let target = open(&file.path, DirectMode::Preferred).unwrap();
    let recording = engine.record().unwrap();
    // Success depends on the injected faults.
    (0..20).for_each(|_| drop(engine.read(&target, 0, region_at(0, 100_000)).unwrap().wait()));
    let recorded = recording.stop().unwrap();
    let stats = engine.stats();
    assert!(stats.requests_failed > 0, "the faults are there");
    let sums = sums(&recorded);
    assert_eq!((sums.requests, sums.requests_failed, sums.ops), (20, stats.requests_failed, stats.ops));
}

#[test]
fn small_transfers_of_callers_have_no_worker() {
    let config = deepnvme_io::Config { workers: 1, ..deepnvme_io::Config::default() };
    let engine = Engine::new(config).unwrap();
    let file = TestFile::holding(&random_bytes(5, 8192));
    let target = open(&file.path, DirectMode::Preferred).unwrap();
    let recording = engine.record().unwrap();
    engine.read_now(&target, 0, region_at(0, 4096)).unwrap().wait().1.unwrap();
    let recorded = recording.stop().unwrap();
    let worker_of = |event: &TraceEvent| match event.kind {
        EventKind::Op { worker, .. } => Some(worker),
        _ => None,
    };
    assert_eq!(recorded.events.iter().filter_map(worker_of).collect::<Vec<_>>(), [None]);
}

#[test]
fn lanes_of_others_and_several_recordings_share_a_timeline() {
    let engine = Engine::new(deepnvme_io::Config { workers: 1, ..deepnvme_io::Config::default() }).unwrap();
    let file = TestFile::holding(&random_bytes(5, 100_000));
    let target = open(&file.path, DirectMode::Preferred).unwrap();
    let compute = engine.lane("compute");
    assert!(!compute.is_on());
    let outer = engine.record().unwrap();
    let start = now_ns();
    engine.read(&target, 0, region_at(0, 100_000)).unwrap().wait().1.unwrap();
    let inner = engine.record().unwrap();
    compute.span("layer 0", start, now_ns());
    let inner = inner.stop().unwrap();
    drop(engine);
    let outer = outer.stop().expect("a recording outlives its engine");
    let Some((last, before)) = outer.events.split_last() else { unreachable!("there are events") };
    assert!(matches!(&last.kind, EventKind::Span { lane, name } if &**lane == "compute" && &**name == "layer 0"));
    assert_eq!(last.start_ns, start);
    assert!(before.iter().any(|event| matches!(event.kind, EventKind::Op { .. })));
    assert!(matches!(
        &before[before.len() - 1].kind,
        EventKind::Request { bytes: 100_000, files: 1, failed: false, .. }
    ));
    assert_eq!(inner.events.len(), 1);
    assert_eq!(inner.events[0].start_ns, inner.start_ns, "cut where that recording began");
}

#[test]
fn a_forked_child_is_refused_and_the_parent_goes_on() {
    use rustix::process::{WaitOptions, waitpid};
    let engine = Engine::new(deepnvme_io::Config { workers: 1, ..deepnvme_io::Config::default() }).unwrap();
    let recording = engine.record().unwrap();
    let lane = engine.lane("compute");
    // SAFETY: the child calls nothing that needs another thread's locks, and ends without unwinding.
    let child = unsafe { libc::fork() };
    if child == 0 {
        lane.span("of the child", now_ns(), now_ns());
        let begun = engine.record().err().map(|error| error.kind());
        let stopped = recording.stop().err().map(|error| error.kind());
        let is_right = (begun, stopped) == (Some(ErrorKind::Closed), Some(ErrorKind::Closed));
        // SAFETY: it ends the process immediately.
        unsafe { libc::_exit(i32::from(!is_right)) };
    }
    let child = rustix::process::Pid::from_raw(child).expect("a child");
    let (_, status) = waitpid(Some(child), WaitOptions::empty()).unwrap().expect("its end");
    assert_eq!(status.exit_status(), Some(0), "both are refused");
    lane.span("of the parent", now_ns(), now_ns());
    assert_eq!(recording.stop().unwrap().events.len(), 1);
}
