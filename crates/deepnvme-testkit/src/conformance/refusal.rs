//! Errors are results of single ops, and syncs are ops.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use deepnvme_io::op::{Errno, OpKind};

use super::{Harness, Make};
use crate::data::{TestFile, bytes_of, random_bytes, region_at, region_holding};

fn read_only(file: &TestFile) -> Arc<OwnedFd> {
    Arc::new(File::open(&file.path).expect("the test file").into())
}

fn write_only(file: &TestFile) -> Arc<OwnedFd> {
    Arc::new(File::options().write(true).open(&file.path).expect("the test file").into())
}

/// A write to a read-only descriptor is EBADF, and returns its memory.
///
/// # Panics
/// If the backend breaks the contract, like every check.
pub fn a_write_to_a_read_only_file_is_refused(make: Make<'_>) {
    let content = random_bytes(1, 1000);
    let file = TestFile::holding(&content);
    let mut harness = Harness::new(make, 2);
    let source = region_at(0, 100).region();
    let op = harness.op(OpKind::Write, &read_only(&file), 0, std::slice::from_ref(&source));
    let completion = harness.run(op);
    assert_eq!(completion.result, Err(Errno::BADF));
    assert_eq!(completion.op.iovecs[0].addr(), source.addr());
    assert_eq!(file.bytes(), content);
}

/// A read from a write-only descriptor is EBADF, and returns its memory unchanged.
pub fn a_read_of_a_write_only_file_is_refused(make: Make<'_>) {
    let file = TestFile::holding(&random_bytes(2, 1000));
    let mut harness = Harness::new(make, 2);
    let target = region_holding(0, &[0xee; 100]);
    let op = harness.op(OpKind::Read, &write_only(&file), 0, &[target.region()]);
    let completion = harness.run(op);
    assert_eq!(completion.result, Err(Errno::BADF));
    assert_eq!(completion.op.iovecs[0].addr(), target.addr());
    assert_eq!(bytes_of(&target.region()), [0xee; 100]);
}

/// A folder cannot be read. Native AIO has its own error for it.
pub fn a_read_of_a_folder_is_refused(make: Make<'_>) {
    let file = TestFile::holding(&[]);
    let folder: Arc<OwnedFd> = Arc::new(File::open(file.dir()).expect("the test folder").into());
    let mut harness = Harness::new(make, 2);
    let result = harness.read(&folder, 0, &region_at(0, 512).region());
    assert!(matches!(result, Err(Errno::ISDIR | Errno::INVAL)), "reading a folder gave {result:?}");
}

/// Refused ops among valid ones: each gets its own result.
pub fn a_refusal_leaves_its_neighbours_alone(make: Make<'_>) {
    let content = random_bytes(3, 16 * 512);
    let file = TestFile::holding(&content);
    let (good, bad) = (read_only(&file), write_only(&file));
    let mut harness = Harness::new(make, 16);
    for index in 0..16 {
        let fd = if index % 3 == 1 { &bad } else { &good };
        let op = harness.op(OpKind::Read, fd, 512 * index, &[region_at(0, 512).region()]);
        harness.submit(op);
    }
    for completion in harness.reap(16) {
        let at = completion.op.offset as usize;
        if (at / 512) % 3 == 1 {
            assert_eq!(completion.result, Err(Errno::BADF), "the op at {at}");
        } else {
            assert_eq!(completion.result, Ok(512), "the op at {at}");
            assert_eq!(bytes_of(&completion.op.iovecs[0]), content[at..at + 512]);
        }
    }
}

/// Both syncs of a file, and one of its folder, complete with 0, even between transfers.
pub fn syncs_complete_with_zero(make: Make<'_>) {
    let file = TestFile::holding(&random_bytes(4, 8192));
    let folder: Arc<OwnedFd> = Arc::new(File::open(file.dir()).expect("the test folder").into());
    let mut harness = Harness::new(make, 8);
    let write = harness.op(OpKind::Write, &file.file, 0, &[region_holding(0, &random_bytes(5, 4096)).region()]);
    harness.submit(write);
    for (kind, fd) in [(OpKind::SyncData, &file.file), (OpKind::SyncAll, &file.file), (OpKind::SyncAll, &folder)] {
        let op = harness.op(kind, fd, 0, &[]);
        harness.submit(op);
    }
    for completion in harness.reap(4) {
        let expected = if completion.op.kind == OpKind::Write { 4096 } else { 0 };
        assert_eq!(completion.result, Ok(expected), "{:?}", completion.op);
        assert!(completion.op.kind == OpKind::Write || completion.op.iovecs.is_empty());
    }
}

/// A file that cannot be synced gives an error.
pub fn a_sync_of_a_pipe_is_refused(make: Make<'_>) {
    let (reader, _writer) = std::io::pipe().expect("a pipe");
    let pipe: Arc<OwnedFd> = Arc::new(reader.into());
    let mut harness = Harness::new(make, 2);
    for kind in [OpKind::SyncData, OpKind::SyncAll] {
        let op = harness.op(kind, &pipe, 0, &[]);
        assert_eq!(harness.run(op).result, Err(Errno::INVAL));
    }
}
