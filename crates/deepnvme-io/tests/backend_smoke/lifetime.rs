//! Lifetimes of ops, files and registered memory.

use std::fs::OpenOptions;
use std::sync::Arc;

use deepnvme_io::SubmitMode;
use deepnvme_io::backend::{self, BackendKind, BackendSetup};
use deepnvme_io::op::{OpKind, Submit};
use deepnvme_mem::RegistrableRange;
use smallvec::smallvec;

use crate::support::{KIB, KINDS, bytes_of, memory, memory_of, on_each, op, random, reap_all, scratch, submit};

#[test]
fn dropping_waits_for_ops_in_flight_and_releases_their_memory() {
    for (kind, is_flushed) in KINDS.into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
        let setup = BackendSetup { queue_depth: 32, submit: SubmitMode::Batch, worker_index: 0 };
        let Ok(mut backend) = backend::open(kind, &setup) else {
            continue;
        };
        let waker = backend.waker();
        let data = random(12, 32 * 64 * KIB);
        let source = memory_of(&data);
        let scratch = scratch(&[]);
        let file = scratch.open(true);
        assert!(kind != BackendKind::Uring || backend.register(&RegistrableRange::from(&source)));
        for index in 0..32 {
            let at = index * 64 * KIB;
            let iovec = source.slice(at..at + 64 * KIB);
            submit(&mut *backend, op(index as u64, OpKind::Write, &file, at, smallvec![iovec]));
        }
        if is_flushed {
            backend.flush().unwrap();
        }
        drop(backend);
        assert_eq!(Arc::strong_count(&file), 1, "{}: an op was kept", kind.name());
        let found = std::fs::read(&scratch.path).unwrap();
        assert!(found == data, "{}: an op that was accepted was not done", kind.name());
        drop(waker);
    }
}

#[test]
fn a_file_that_was_used_much_is_closed_with_its_last_owner() {
    on_each(32, SubmitMode::Batch, |backend| {
        let scratch = scratch(&random(13, 64 * KIB));
        let file = scratch.open(false);
        let memory = memory(4096);
        let mut completions = Vec::new();
        let other = scratch.open(true);
        submit(backend, op(0, OpKind::Read, &other, 0, smallvec![memory.clone()]));
        for token in 1..500 {
            let mut next = op(token, OpKind::Read, &file, 4096, smallvec![memory.clone()]);
            while let Submit::Busy(back) = backend.submit(next) {
                backend.reap(1, &mut completions).unwrap();
                next = back;
            }
        }
        completions.append(&mut reap_all(backend));
        assert!(completions.iter().all(|completion| completion.result == Ok(4096)));
        drop(completions);
        // A lease is refused while another open file description exists anywhere.
        drop((file, other));
        let only = OpenOptions::new().read(true).write(true).open(&scratch.path).unwrap();
        // SAFETY: a command without pointers on an open descriptor.
        let lease = unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(&only), libc::F_SETLEASE, libc::F_WRLCK) };
        assert_eq!(lease, 0, "{}: something keeps the file open", backend.kind().name());
    });
}

#[test]
fn memory_can_be_registered_again_and_again() {
    let setup = BackendSetup { queue_depth: 8, submit: SubmitMode::Batch, worker_index: 0 };
    let Ok(mut backend) = backend::open(BackendKind::Uring, &setup) else {
        return;
    };
    let scratch = scratch(&random(14, 64 * KIB));
    let file = scratch.open(true);
    for round in 0..400 {
        let whole = memory(64 * KIB);
        assert!(backend.register(&RegistrableRange::from(&whole)), "round {round}");
        assert!(backend.register(&RegistrableRange::from(&whole)), "the same memory twice is counted");
        assert!(
            !backend.register(&RegistrableRange::from(&whole.slice(4096..8192))),
            "memory inside other memory is refused"
        );
        submit(&mut *backend, op(0, OpKind::Read, &file, 0, smallvec![whole.slice(0..32 * KIB)]));
        backend.flush().unwrap();
        backend.unregister(&RegistrableRange::from(&whole));
        let rest = smallvec![whole.slice(32 * KIB..64 * KIB)];
        submit(&mut *backend, op(1, OpKind::Read, &file, 32 * KIB, rest));
        let completions = reap_all(&mut *backend);
        assert!(completions.iter().all(|completion| completion.result == Ok(32 * KIB)));
        backend.unregister(&RegistrableRange::from(&whole));
        backend.unregister(&RegistrableRange::from(&whole));
        assert!(bytes_of(&whole) == random(14, 64 * KIB));
    }
}
