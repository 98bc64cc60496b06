//! The scheduled backend: seeded schedules and power cuts.
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "these are tests")]

use std::collections::BTreeSet;
use std::sync::Arc;

use deepnvme_io::SubmitMode;
use deepnvme_io::backend::{self, Backend, BackendKind, BackendSetup};
use deepnvme_io::op::OpKind;
use deepnvme_testkit::conformance::Harness;
use deepnvme_testkit::data::{TestFile, random_bytes, region_at, region_holding};
use deepnvme_testkit::scheduled_backend::SimDisk;

const BLOCK: usize = 4096;

fn harness(disk: &SimDisk, worker_index: u32) -> Harness {
    let make = |setup: &BackendSetup| -> Box<dyn Backend> {
        let one_op = BackendSetup { queue_depth: 1, submit: SubmitMode::Single, worker_index: 0 };
        let real_backend = backend::open(BackendKind::Threads, &one_op).expect("threads work everywhere");
        Box::new(disk.backend(&BackendSetup { worker_index, ..setup.clone() }, real_backend))
    };
    Harness::new(&make, 32)
}

/// Returns the order of completion of 32 reads.
fn order_of_completions(seed: u64) -> Vec<u64> {
    let file = TestFile::holding(&random_bytes(1, 32 * 512));
    let disk = SimDisk::new(seed);
    let mut harness = harness(&disk, 0);
    for index in 0..32 {
        let op = harness.op(OpKind::Read, &file.file, 512 * index, &[region_at(0, 512).region()]);
        harness.submit(op);
    }
    harness.reap(32).iter().map(|completion| completion.op.token.0).collect()
}

#[test]
fn the_schedule_is_a_function_of_the_seed() {
    let orders: BTreeSet<Vec<u64>> = (0..20).map(order_of_completions).collect();
    assert!(orders.len() > 15, "the seeds hardly matter");
    for seed in 0..5 {
        assert_eq!(order_of_completions(seed), order_of_completions(seed));
    }
    let sorted: Vec<u64> = (1..33).collect();
    assert!(!orders.contains(&sorted), "ops completed in the order of their submission");
}

#[test]
fn synced_bytes_survive_and_others_are_at_risk() {
    let old = random_bytes(1, 4 * BLOCK);
    let file = TestFile::holding(&old);
    let disk = SimDisk::new(3);
    let mut harness = harness(&disk, 0);
    let (first, second) = (random_bytes(2, BLOCK), random_bytes(3, 2 * BLOCK));
    assert_eq!(harness.write(&file.file, 0, &region_holding(0, &first).region()), Ok(BLOCK));
    assert_eq!(disk.unsynced_writes(&*file.file), 1);
    let sync = harness.op(OpKind::SyncData, &file.file, 0, &[]);
    assert_eq!(harness.run(sync).result, Ok(0));
    assert_eq!(disk.unsynced_writes(&*file.file), 0);
    assert_eq!(harness.write(&file.file, 3 * BLOCK as u64, &region_holding(0, &second).region()), Ok(2 * BLOCK));

    let (mut whole, mut lost, mut torn) = (0, 0, 0);
    for crash_seed in 0..200 {
        let image = disk.crash_image(&*file.file, crash_seed).expect("the file was written");
        assert_eq!(image[..BLOCK], first, "a synced write was lost");
        assert_eq!(image[BLOCK..3 * BLOCK], old[BLOCK..3 * BLOCK], "bytes that nobody wrote have changed");
        for (sector, bytes) in image[3 * BLOCK..].chunks(512).enumerate() {
            let new = &second[sector * 512..(sector + 1) * 512];
            let before = if sector < 8 { &old[3 * BLOCK + sector * 512..][..512] } else { &[0; 512][..] };
            assert!(bytes == new || bytes == before, "sector {sector} is neither old nor new");
        }
        match image.get(3 * BLOCK..) {
            Some(tail) if tail == second => whole += 1,
            Some(tail) if tail == &old[3 * BLOCK..] => lost += 1,
            _ => torn += 1,
        }
    }
    assert!(whole > 20 && lost > 20 && torn > 20, "{whole} whole, {lost} lost, {torn} torn");
}

#[test]
fn a_sync_promises_only_writes_reported_before_it() {
    let mut risky = 0;
    for seed in 0..20 {
        let file = TestFile::holding(&random_bytes(1, BLOCK));
        let disk = SimDisk::new(seed);
        let mut harness = harness(&disk, 0);
        let write = harness.op(OpKind::Write, &file.file, 0, &[region_holding(0, &random_bytes(9, BLOCK)).region()]);
        harness.submit(write);
        let sync = harness.op(OpKind::SyncAll, &file.file, 0, &[]);
        harness.submit(sync);
        harness.reap(2);
        risky += disk.unsynced_writes(&*file.file);
    }
    assert_eq!(risky, 20, "a sync next to a write in flight is no promise");
}

#[test]
fn descriptors_of_one_file_and_backends_of_one_disk_share_its_fate() {
    let file = TestFile::holding(&random_bytes(1, BLOCK));
    let again: Arc<std::os::fd::OwnedFd> =
        Arc::new(std::fs::File::options().read(true).write(true).open(&file.path).expect("the test file").into());
    let disk = SimDisk::new(1);
    let (mut writer, mut syncer) = (harness(&disk, 0), harness(&disk, 1));
    let bytes = random_bytes(2, BLOCK);
    assert_eq!(writer.write(&file.file, 0, &region_holding(0, &bytes).region()), Ok(BLOCK));
    let sync = syncer.op(OpKind::SyncData, &again, 0, &[]);
    assert_eq!(syncer.run(sync).result, Ok(0));
    assert_eq!(disk.crash_image(&*again, 5), Some(bytes));
    assert_eq!(disk.crash_image(&*TestFile::holding(b"other").file, 5), None);
}

#[test]
fn a_truncated_file_stays_short_once_synced() {
    let file = TestFile::holding(&random_bytes(1, 4 * BLOCK));
    let disk = SimDisk::new(1);
    let mut harness = harness(&disk, 0);
    let bytes = random_bytes(2, BLOCK);
    assert_eq!(harness.write(&file.file, 0, &region_holding(0, &bytes).region()), Ok(BLOCK));
    std::fs::File::options().write(true).open(&file.path).and_then(|file| file.set_len(BLOCK as u64)).expect("cut");
    assert_eq!(disk.crash_image(&*file.file, 0).map(|image| image.len()), Some(4 * BLOCK));
    let sync = harness.op(OpKind::SyncAll, &file.file, 0, &[]);
    assert_eq!(harness.run(sync).result, Ok(0));
    assert_eq!(disk.crash_image(&*file.file, 0), Some(bytes));
}
