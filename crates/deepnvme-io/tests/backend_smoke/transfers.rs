//! Transfers: directions, iovecs, the end of the file, syncs, refusals.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use deepnvme_io::SubmitMode;
use deepnvme_io::backend::{Backend, BackendKind};
use deepnvme_io::op::{Errno, IOV_MAX, Iovecs, OpKind, Submit};
use deepnvme_mem::{Region, RegistrableRange};
use smallvec::smallvec;

use crate::support::{KIB, bytes_of, memory, memory_of, on_each, one, op, random, reap_all, scratch, submit};

/// Writes a file block by block through the backend and reads it back, with more ops than the queue depth.
fn round_trip(backend: &mut dyn Backend, direct: bool, registered: bool) {
    const BLOCK: usize = 16 * KIB;
    const BLOCKS: usize = 200;
    let data = random(7, BLOCK * BLOCKS);
    let scratch = scratch(&[]);
    let file = scratch.open(direct);
    for (kind, memory) in [(OpKind::Write, memory_of(&data)), (OpKind::Read, memory(data.len()))] {
        if registered {
            let pinned = backend.register(&RegistrableRange::from(&memory));
            assert_eq!(pinned, backend.kind() == BackendKind::Uring);
        }
        let mut completions = Vec::new();
        for block in 0..BLOCKS {
            let iovec = memory.slice(block * BLOCK..(block + 1) * BLOCK);
            let mut next = op(block as u64, kind, &file, block * BLOCK, smallvec![iovec]);
            while let Submit::Busy(back) = backend.submit(next) {
                backend.reap(1, &mut completions).unwrap();
                next = back;
            }
        }
        completions.append(&mut reap_all(backend));
        assert_eq!(completions.len(), BLOCKS);
        assert!(completions.iter().all(|completion| completion.result == Ok(BLOCK)));
        backend.unregister(&RegistrableRange::from(&memory));
        if kind == OpKind::Read {
            assert!(bytes_of(&memory) == data, "what was read is not what was written");
        }
    }
    assert!(std::fs::read(&scratch.path).unwrap() == data, "the file differs");
}

#[test]
fn writes_and_reads_back() {
    for (direct, registered) in [(false, false), (true, false), (true, true), (false, true)] {
        on_each(8, SubmitMode::Batch, |backend| {
            round_trip(backend, direct, registered);
        });
    }
}

#[test]
fn single_submission_reaches_the_kernel_at_once() {
    on_each(8, SubmitMode::Single, |backend| {
        round_trip(backend, true, false);
        let scratch = scratch(&random(1, 4096));
        let memory = memory(4096);
        submit(backend, op(0, OpKind::Read, &scratch.open(false), 0, smallvec![memory.clone()]));
        let deadline = Instant::now() + Duration::from_secs(20);
        while bytes_of(&memory) != random(1, 4096) {
            // `reap` with 0 does not wait. A `Single` backend needs nothing else here.
            assert!(Instant::now() < deadline, "the op did not start without a flush");
            backend.reap(0, &mut Vec::new()).unwrap();
            // A checker that runs one thread at a time may never schedule the transferring thread while this one is
            // busy.
            std::thread::sleep(Duration::from_millis(1));
        }
        reap_all(backend);
    });
}

#[test]
fn vectored_ops_fill_their_iovecs_in_order() {
    on_each(4, SubmitMode::Batch, |backend| {
        let data = random(3, 100_000);
        let scratch = scratch(&vec![0xAA; 100_010]);
        let file = scratch.open(false);
        let source = memory_of(&data);
        let cuts = [0, 1, 4096, 4097, 50_000, 100_000];
        let cut = |region: &Region| -> Iovecs { cuts.windows(2).map(|w| region.slice(w[0]..w[1])).collect() };
        let written = one(backend, op(1, OpKind::Write, &file, 5, cut(&source)));
        assert_eq!((written.result, written.op.bytes()), (Ok(100_000), 100_000));
        let target = memory(100_000);
        assert_eq!(one(backend, op(2, OpKind::Read, &file, 5, cut(&target))).result, Ok(100_000));
        assert!(bytes_of(&target) == data);
        let file_bytes = std::fs::read(&scratch.path).unwrap();
        assert!(file_bytes[..5] == [0xAA; 5] && file_bytes[100_005..] == [0xAA; 5], "neighbours were changed");
        let many: Iovecs = (0..IOV_MAX).map(|iovec| target.slice(iovec..iovec + 1)).collect();
        let most = one(backend, op(3, OpKind::Read, &file, 5, many));
        assert_eq!(most.result, Ok(IOV_MAX));
    });
}

#[test]
fn the_end_of_the_file_is_a_short_read() {
    on_each(4, SubmitMode::Batch, |backend| {
        let scratch = scratch(&random(8, 5000));
        let file = scratch.open(false);
        let read = |backend: &mut dyn Backend, offset| {
            one(backend, op(0, OpKind::Read, &file, offset, smallvec![memory(4096)])).result
        };
        assert_eq!(read(backend, 0), Ok(4096));
        assert_eq!(read(backend, 4096), Ok(904));
        assert_eq!(read(backend, 5000), Ok(0));
        assert_eq!(read(backend, 1 << 30), Ok(0));
    });
}

#[test]
fn a_refused_op_is_its_own_failure() {
    on_each(8, SubmitMode::Batch, |backend| {
        let scratch = scratch(&random(9, 8192));
        let good = scratch.open(false);
        let read_only: Arc<OwnedFd> = Arc::new(File::open(&scratch.path).unwrap().into());
        let (pipe, _other_end) = std::io::pipe().unwrap();
        let bytes = || -> Iovecs { smallvec![memory(4096)] };
        submit(backend, op(0, OpKind::Read, &good, 0, bytes()));
        submit(backend, op(1, OpKind::Write, &read_only, 0, bytes()));
        submit(backend, op(2, OpKind::Read, &good, 4096, bytes()));
        submit(backend, op(3, OpKind::SyncData, &Arc::new(pipe.into()), 0, smallvec![]));
        submit(backend, op(4, OpKind::SyncAll, &good, 0, smallvec![]));
        let results: Vec<_> = reap_all(backend).into_iter().map(|completion| completion.result).collect();
        let expected = [Ok(4096), Err(Errno::BADF), Ok(4096), Err(Errno::INVAL), Ok(0)];
        assert_eq!(results, expected, "{}", backend.kind().name());
        let misaligned = smallvec![memory(8192).slice(1..4097)];
        let result = one(backend, op(5, OpKind::Read, &scratch.open(true), 0, misaligned)).result;
        assert!(result == Err(Errno::INVAL) || result == Ok(4096), "{result:?}");
    });
}

#[test]
fn both_kinds_of_sync_work() {
    on_each(4, SubmitMode::Batch, |backend| {
        let scratch = scratch(&[]);
        let file = scratch.open(false);
        let data = random(10, 4096);
        assert_eq!(one(backend, op(0, OpKind::Write, &file, 0, smallvec![memory_of(&data)])).result, Ok(4096));
        assert_eq!(one(backend, op(1, OpKind::SyncData, &file, 0, smallvec![])).result, Ok(0));
        assert_eq!(one(backend, op(2, OpKind::SyncAll, &file, 0, smallvec![])).result, Ok(0));
        let folder: Arc<OwnedFd> = Arc::new(File::open(scratch.path.parent().unwrap()).unwrap().into());
        assert_eq!(one(backend, op(3, OpKind::SyncAll, &folder, 0, smallvec![])).result, Ok(0));
    });
}
