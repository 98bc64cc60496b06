//! Saving to a disk that fails, stutters and delays: the file is correct, or the save fails and keeps the old file.

#![allow(clippy::unwrap_used)]

mod common;

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use deepnvme_checkpoint::read::{Reader, Verify};
use deepnvme_checkpoint::write::{Save, SaveOptions};
use deepnvme_checkpoint::{Error, Progress, convert};
use deepnvme_file::Target;
use deepnvme_io::backend::BackendKind;
use deepnvme_io::mem::RegionMut;
use deepnvme_io::{BackendFactory, Config, Engine, ErrorKind};
use deepnvme_testkit::faults::{FaultPlan, Faults};
use proptest::prelude::*;

use crate::common::{engine, plan_archive, plan_safetensors, random};

fn faulty(plan: FaultPlan) -> (Arc<Engine>, Faults) {
    faulty_with(Config { workers: 2, ..Config::default() }, plan)
}

fn faulty_with(config: Config, plan: FaultPlan) -> (Arc<Engine>, Faults) {
    let faults = Faults::new(plan);
    let wrap = faults.clone();
    let factory: BackendFactory =
        Arc::new(move |setup| Ok(Box::new(wrap.wrap(deepnvme_io::backend::open(BackendKind::Threads, setup)?))));
    (Arc::new(Engine::with_backends(config, factory).unwrap()), faults)
}

fn states(seed: u64) -> Vec<Vec<u8>> {
    vec![
        random(2_500_000, seed),
        random(100, seed + 1),
        random(1 << 20, seed + 2),
        Vec::new(),
        random(70_001, seed + 3),
    ]
}

/// Saves over an old file. Either the new file equals one from a faultless disk, or the old file is intact.
fn save_over(path: &Path, save: Save, plan: FaultPlan) -> Result<u64, Error> {
    let (engine, faults) = faulty(plan);
    let old = std::fs::read(path).unwrap();
    let saved = save.run(engine, &Target::from(path), Arc::default());
    let names = std::fs::read_dir(path.parent().unwrap()).unwrap().count();
    assert_eq!(names, 1, "no temporary is left");
    if saved.is_err() {
        assert!(std::fs::read(path).unwrap() == old, "the old file");
        assert!(faults.counts().fatal() > 0, "nothing else fails: {saved:?}");
    }
    saved.map(|_| faults.counts().fatal())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn the_new_file_or_the_old_one(
        seed: u64,
        is_archive: bool,
        eio in prop_oneof![Just(0u32), 1..300u32],
        enospc in prop_oneof![Just(0u32), 1..200u32],
        sync_eio in prop_oneof![Just(0u32), 500..1000u32],
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.file");
        let plan = if is_archive { plan_archive } else { plan_safetensors };
        plan(&path, &states(1), SaveOptions::default()).run(engine(), &Target::from(&path), Arc::default()).unwrap();
        let new = states(seed >> 1);
        let faults = FaultPlan {
            seed, eio, enospc, sync_eio, short: 200, eintr: 50, eagain: 50, reorder: true, ..FaultPlan::default()
        };
        match save_over(&path, plan(&path, &new, SaveOptions::default()), faults) {
            Ok(fatal) => {
                prop_assert_eq!(fatal, 0, "a failure was swallowed");
                let mut reader = Reader::open(&engine(), &Target::from(&path)).unwrap();
                let bytes = reader.verify_all(&engine(), &Progress::default()).unwrap();
                prop_assert_eq!(bytes, new.iter().map(|state| state.len() as u64).sum::<u64>());
            }
            Err(Error::Io(error)) => {
                prop_assert_eq!(error.path(), Some(path.as_path()));
                prop_assert!(matches!(error.kind(), ErrorKind::Io | ErrorKind::NoSpace), "{}", error);
            }
            Err(other) => prop_assert!(false, "{other}"),
        }
    }
}

#[test]
fn a_slow_disk_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.pt");
    let slow = FaultPlan { seed: 3, slow: 300, slow_max: Duration::from_millis(20), ..FaultPlan::default() };
    let (engine, faults) = faulty(slow);
    plan_archive(&path, &states(5), SaveOptions::default())
        .run(Arc::clone(&engine), &Target::from(&path), Arc::default())
        .unwrap();
    assert!(faults.counts().slow > 0);
    Reader::open(&engine, &Target::from(&path)).unwrap().verify_all(&engine, &Progress::default()).unwrap();
}

#[test]
fn a_source_that_cannot_be_read_is_named_and_nothing_is_converted() {
    let folder = tempfile::tempdir().unwrap();
    let (source, target) = (folder.path().join("a.pt"), folder.path().join("b.safetensors"));
    let save = plan_archive(&source, &states(9), SaveOptions::default());
    save.run(engine(), &Target::from(&source), Arc::default()).unwrap();
    let (engine, _) = faulty(FaultPlan { eio_at_byte: Some(1_000_000), ..FaultPlan::default() });
    let failed = convert(&engine, &source, &target, SaveOptions::default(), &Arc::new(Progress::default()));
    let Err(Error::Io(error)) = failed else { unreachable!("{failed:?}") };
    assert_eq!(error.path(), Some(source.as_path()));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn a_source_that_changes_while_it_is_converted_gets_no_new_checksums() {
    let folder = tempfile::tempdir().unwrap();
    let (source, target) = (folder.path().join("a.pt"), folder.path().join("b.safetensors"));
    let options = SaveOptions { has_checksums: false, ..SaveOptions::default() };
    plan_archive(&source, &states(9), options).run(engine(), &Target::from(&source), Arc::default()).unwrap();
    let file = std::fs::OpenOptions::new().read(true).write(true).open(&source).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 300_000).unwrap();
    let (is_over, began) = (AtomicBool::new(false), Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            began.wait();
            // The same byte again: only the time of change tells.
            while !is_over.load(Ordering::Relaxed) {
                file.write_all_at(&byte, 300_000).unwrap();
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        began.wait();
        let failed = convert(&engine(), &source, &target, SaveOptions::default(), &Arc::new(Progress::default()));
        is_over.store(true, Ordering::Relaxed);
        assert!(matches!(&failed, Err(Error::Changed { path }) if *path == source), "{failed:?}");
    });
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

/// All requests are cancelled at once. Cancelling them one after the other would read the whole file.
#[test]
fn a_stopped_load_reads_only_the_blocks_that_have_begun() {
    const RECORD_BYTES: usize = 4 << 20;
    const RECORDS: usize = 20;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let records: Vec<Vec<u8>> = (0..RECORDS).map(|index| random(RECORD_BYTES, index as u64)).collect();
    plan_safetensors(&path, &records, SaveOptions::default())
        .run(engine(), &Target::from(&path), Arc::default())
        .unwrap();
    let slow = FaultPlan { seed: 7, slow: 1000, slow_max: Duration::from_millis(50), ..FaultPlan::default() };
    let (engine, _) = faulty_with(Config { workers: 1, queue_depth: 2, ..Config::default() }, slow);
    let reader = Arc::new(Reader::open(&engine, &Target::from(&path)).unwrap());
    let mut loading = reader.empty_load(&engine);
    for buffer in (0..RECORDS).flat_map(|record| reader.load_buffers(&[record])) {
        let target = RegionMut::from_vec(vec![0; buffer.bytes as usize]);
        loading.add(&engine, vec![(buffer, target)]).unwrap();
    }
    let progress = Progress::default();
    progress.stop();
    let stopped = loading.finish(Verify::Off, &progress).unwrap_err();
    assert!(matches!(stopped, Error::Interrupted), "{stopped}");
    let read = engine.stats().bytes_read;
    assert!(read < RECORD_BYTES as u64, "{read} bytes were read");
}
