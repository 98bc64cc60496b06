//! The queue's guarantees: depth, waits and wakes.

use std::time::Duration;

use deepnvme_io::SubmitMode;
use deepnvme_io::backend::{self, BackendSetup};
use deepnvme_io::op::{OpKind, Submit, Token};
use smallvec::smallvec;

use crate::support::{KIB, KINDS, bytes_of, memory, on_each, one, op, random, reap_all, scratch, submit};

#[test]
fn a_full_queue_returns_the_op() {
    on_each(3, SubmitMode::Batch, |backend| {
        let scratch = scratch(&random(5, 64 * KIB));
        let file = scratch.open(false);
        for round in 0..50 {
            for token in 0..3 {
                submit(backend, op(token, OpKind::Read, &file, 0, smallvec![memory(KIB)]));
            }
            assert_eq!(backend.in_flight(), 3);
            let fourth = op(99 + round, OpKind::Read, &file, 0, smallvec![memory(KIB)]);
            let Submit::Busy(back) = backend.submit(fourth) else { panic!("3 in flight are all that fit") };
            assert_eq!((back.token, backend.in_flight()), (Token(99 + round), 3));
            let tokens: Vec<u64> = reap_all(backend).iter().map(|completion| completion.op.token.0).collect();
            assert_eq!(tokens, [0, 1, 2]);
        }
    });
}

#[test]
fn reap_waits_for_as_many_as_it_is_asked_for() {
    on_each(16, SubmitMode::Batch, |backend| {
        let scratch = scratch(&random(6, 64 * KIB));
        let file = scratch.open(true);
        let memory = memory(64 * KIB);
        for token in 0..16 {
            let at = token * 4096;
            let iovec = memory.slice(at..at + 4096);
            submit(backend, op(token as u64, OpKind::Read, &file, at, smallvec![iovec]));
        }
        let mut completions = Vec::new();
        backend.flush().unwrap();
        backend.reap(10, &mut completions).unwrap();
        assert!(completions.len() >= 10 && completions.len() + backend.in_flight() as usize == 16);
        completions.append(&mut reap_all(backend));
        assert_eq!(completions.len(), 16);
        assert!(bytes_of(&memory) == random(6, 64 * KIB));
    });
}

#[test]
fn a_wake_ends_a_wait_early() {
    on_each(4, SubmitMode::Batch, |backend| {
        let mut completions = Vec::new();
        let waker = backend.waker();
        // Wakes before the wait, then wakes from another thread during it. The waits are also for more ops than are in
        // flight.
        waker.wake();
        waker.wake();
        backend.reap(1, &mut completions).unwrap();
        for _ in 0..20 {
            let other = backend.waker();
            let thread = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(3));
                other.wake();
            });
            backend.reap(3, &mut completions).unwrap();
            thread.join().unwrap();
        }
        // A reap with `min` 0 neither waits nor consumes the wake.
        waker.wake();
        backend.reap(0, &mut completions).unwrap();
        backend.reap(1, &mut completions).unwrap();
        assert!(completions.is_empty() && backend.in_flight() == 0);
        // An unneeded wake does not affect later ops.
        waker.wake();
        let scratch = scratch(&random(11, 4096));
        let read = op(0, OpKind::Read, &scratch.open(false), 0, smallvec![memory(4096)]);
        assert_eq!(one(backend, read).result, Ok(4096));
    });
}

#[test]
fn a_waker_outlives_its_backend() {
    for kind in KINDS {
        let setup = BackendSetup { queue_depth: 4, submit: SubmitMode::Batch, worker_index: 0 };
        if let Ok(backend) = backend::open(kind, &setup) {
            let waker = backend.waker();
            drop(backend);
            waker.wake();
            waker.wake();
        }
    }
}
