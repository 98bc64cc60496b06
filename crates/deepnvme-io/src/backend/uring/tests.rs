//! Runs every ring mode on this kernel.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use deepnvme_mem::Buffer;
use smallvec::smallvec;

use super::*;
use crate::op::{OpKind, Token};

const OPS: usize = 100;
const BLOCK_BYTES: usize = 4096;

/// Creates a file in memory whose blocks all differ.
fn file_of_blocks() -> (Arc<OwnedFd>, Vec<u8>) {
    let content: Vec<u8> = (0..OPS * BLOCK_BYTES).map(|at| (at / BLOCK_BYTES * 31 + at * 7) as u8).collect();
    let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let file = File::from(fd);
    std::os::unix::fs::FileExt::write_all_at(&file, &content, 0).unwrap();
    (Arc::new(file.into()), content)
}

fn read_all(backend: &mut UringBackend, file: &Arc<OwnedFd>) -> Vec<u8> {
    let target = Buffer::zeroed(OPS * BLOCK_BYTES).unwrap().into_region();
    let mut completions = Vec::new();
    for index in 0..OPS {
        let at = index * BLOCK_BYTES;
        let iovecs = smallvec![target.region().slice(at..at + BLOCK_BYTES)];
        let (token, file) = (Token(index as u64), Arc::clone(file));
        let mut op = Op { token, kind: OpKind::Read, file, offset: at as u64, iovecs, cufile: None };
        while let Submit::Busy(back) = backend.submit(op) {
            backend.reap(1, &mut completions).unwrap();
            op = back;
        }
    }
    while backend.in_flight() > 0 {
        backend.reap(1, &mut completions).unwrap();
    }
    assert!(completions.iter().all(|completion| completion.result == Ok(BLOCK_BYTES)));
    let mut found = vec![0; target.len()];
    target.region().copy_to_slice(0, &mut found);
    found
}

#[test]
fn every_mode_moves_bytes_and_can_be_woken() {
    for mode in RingMode::ALL {
        for submit in [SubmitMode::Batch, SubmitMode::Single] {
            let setup = BackendSetup { queue_depth: 8, submit, worker_index: 0 };
            let mut backend = match UringBackend::open_in(&setup, &[mode]) {
                Ok(backend) => backend,
                Err(error) => {
                    eprintln!("SKIPPED {mode:?}: {error}");
                    continue;
                }
            };
            assert!(backend.describe().starts_with(mode.flags()));
            let (file, content) = file_of_blocks();
            assert!(read_all(&mut backend, &file) == content, "{mode:?}");
            let waker = backend.waker();
            let thread = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(5));
                waker.wake();
            });
            backend.reap(1, &mut Vec::new()).unwrap();
            thread.join().unwrap();
        }
    }
}

#[test]
fn looking_shows_completed_ops_in_every_mode() {
    for mode in RingMode::ALL {
        let setup = BackendSetup { queue_depth: 8, submit: SubmitMode::Batch, worker_index: 0 };
        let Ok(mut backend) = UringBackend::open_in(&setup, &[mode]) else { continue };
        let (file, _) = file_of_blocks();
        let iovecs = smallvec![Buffer::zeroed(BLOCK_BYTES).unwrap().into_region().region()];
        let op = Op { token: Token(0), kind: OpKind::Read, file, offset: 0, iovecs, cufile: None };
        assert!(matches!(backend.submit(op), Submit::Queued));
        let mut completions = Vec::new();
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        while completions.is_empty() {
            assert!(std::time::Instant::now() < deadline, "{mode:?}: looking never shows the completion");
            backend.reap(0, &mut completions).unwrap();
        }
        assert_eq!(completions[0].result, Ok(BLOCK_BYTES));
    }
}

#[test]
fn a_ring_that_no_mode_can_make_is_an_error() {
    if let Err(error) = Ring::open(8, &RingMode::ALL) {
        return eprintln!("SKIPPED: {error}");
    }
    let too_many_entries = 1 << 20;
    assert_eq!(Ring::open(too_many_entries, &RingMode::ALL).err().unwrap().errno(), Some(libc::EINVAL));
}
