//! Tests rare kernel behaviour: a submission that is accepted in part, no poll, and no room for another queue.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use deepnvme_mem::Buffer;
use smallvec::smallvec;

use super::*;
use crate::op::{OpKind, Token};

const DEPTH: u32 = 256;
const BLOCK_BYTES: usize = 64 << 10;

fn setup() -> BackendSetup {
    BackendSetup { queue_depth: DEPTH, submit: SubmitMode::Batch, worker_index: 0 }
}

/// A backend whose queue in the kernel is far smaller than its depth.
fn cramped() -> Option<AioBackend> {
    match AioBackend::open_with_length(&setup(), 1) {
        Ok(backend) => Some(backend),
        Err(error) => {
            eprintln!("SKIPPED: {error}");
            None
        }
    }
}

#[test]
fn ops_that_the_kernel_has_no_room_for_go_later() {
    let Some(mut backend) = cramped() else { return };
    // The folder of the test's own program is on a disk. The folder for temporary files may be in memory.
    let program = std::env::current_exe().unwrap();
    let mut file = tempfile::NamedTempFile::new_in(program.parent().unwrap()).unwrap();
    let content: Vec<u8> = (0..BLOCK_BYTES * DEPTH as usize).map(|at| (at / 4096 * 13 + at) as u8).collect();
    file.write_all(&content).unwrap();
    // Direct I/O, so that the ops stay in the kernel for a while instead of ending inside `io_submit`.
    let direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(file.path());
    let file = Arc::new(direct.unwrap_or_else(|_| File::open(file.path()).unwrap()).into());
    let target = Buffer::zeroed(content.len()).unwrap().into_region();
    let mut was_refused_room = false;
    for round in 0..20 {
        for index in 0..DEPTH as usize {
            let at = index * BLOCK_BYTES;
            let iovecs = smallvec![target.region().slice(at..at + BLOCK_BYTES)];
            let (token, file) = (Token(index as u64), Arc::clone(&file));
            let op = Op { token, kind: OpKind::Read, file, offset: at as u64, iovecs, cufile: None };
            assert!(matches!(backend.submit(op), Submit::Queued));
        }
        backend.flush().unwrap();
        was_refused_room |= !backend.collected.is_empty();
        let mut completions = Vec::new();
        while backend.in_flight() > 0 {
            backend.reap(if round % 2 == 0 { 1 } else { backend.in_flight() }, &mut completions).unwrap();
        }
        assert_eq!(completions.len(), DEPTH as usize);
        assert!(completions.iter().all(|completion| completion.result == Ok(BLOCK_BYTES)));
    }
    assert!(was_refused_room, "the kernel had room for everything; this test shows nothing");
    let mut found = vec![0; content.len()];
    target.region().copy_to_slice(0, &mut found);
    assert!(found == content);
}

#[test]
fn a_wake_needs_no_poll() {
    let Ok(mut backend) = AioBackend::open(&setup()) else { return };
    backend.wake_poll.disable_polling();
    for _ in 0..5 {
        let waker = backend.waker();
        let started = std::time::Instant::now();
        let thread = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(5));
            waker.wake();
        });
        backend.reap(1, &mut Vec::new()).unwrap();
        assert!(started.elapsed() > Duration::from_millis(4), "nothing had happened yet");
        thread.join().unwrap();
    }
}

#[test]
fn a_system_without_room_says_which_limit_to_raise() {
    let text = set_up_error(Errno::AGAIN, 32).to_string();
    assert!(text.contains("/proc/sys/fs/aio-max-nr") && text.contains("io_setup"), "{text}");
    let max: u64 = std::fs::read_to_string("/proc/sys/fs/aio-max-nr").unwrap().trim().parse().unwrap();
    // The kernel's own refusal of more ops than the limit. Far beyond the limit, it returns EINVAL.
    if max < 4 << 20 {
        assert_eq!(Context::new(max as u32 * 2).unwrap_err(), Errno::AGAIN);
    }
}
