//! Shared helpers: a file on disk, memory, and every backend that works here.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;

use deepnvme_io::SubmitMode;
use deepnvme_io::backend::{self, Backend, BackendKind, BackendSetup};
use deepnvme_io::op::{Completion, Iovecs, Op, OpKind, Submit, Token};
use deepnvme_mem::{Buffer, Region};

pub(crate) const KINDS: [BackendKind; 3] = [BackendKind::Uring, BackendKind::Aio, BackendKind::Threads];
pub(crate) const KIB: usize = 1024;

/// Runs `test` on each backend that works here. Reports the others, which `probe`'s tests cover.
pub(crate) fn on_each(queue_depth: u32, submit: SubmitMode, test: impl Fn(&mut dyn Backend)) {
    let mut ran = 0;
    for kind in KINDS {
        let setup = BackendSetup { queue_depth, submit, worker_index: 0 };
        match backend::open(kind, &setup) {
            Ok(mut backend) => {
                assert_eq!((backend.kind(), backend.depth(), backend.in_flight()), (kind, queue_depth, 0));
                test(&mut *backend);
                ran += 1;
            }
            Err(error) => eprintln!("SKIPPED {}: {error}", kind.name()),
        }
    }
    assert!(ran > 0, "threads work everywhere");
}

/// Returns bytes that neither repeat nor compress.
pub(crate) fn random(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = std::iter::from_fn(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        Some(state.to_le_bytes())
    });
    next.flatten().take(len).collect()
}

pub(crate) struct Scratch {
    pub(crate) path: PathBuf,
    _folder: tempfile::TempDir,
}

pub(crate) fn scratch(content: &[u8]) -> Scratch {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("data");
    File::create(&path).unwrap().write_all(content).unwrap();
    Scratch { path, _folder: folder }
}

impl Scratch {
    pub(crate) fn open(&self, direct: bool) -> Arc<OwnedFd> {
        let flags = if direct { libc::O_DIRECT } else { 0 };
        let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(&self.path);
        Arc::new(file.unwrap().into())
    }
}

pub(crate) fn memory(len: usize) -> Region {
    Buffer::zeroed(len).unwrap().into_region().region()
}

pub(crate) fn memory_of(bytes: &[u8]) -> Region {
    let mut buffer = Buffer::zeroed(bytes.len()).unwrap();
    buffer.as_mut_slice().copy_from_slice(bytes);
    buffer.into_region().region()
}

pub(crate) fn bytes_of(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.copy_to_slice(0, &mut bytes);
    bytes
}

pub(crate) fn op(token: u64, kind: OpKind, file: &Arc<OwnedFd>, offset: usize, iovecs: Iovecs) -> Op {
    Op { token: Token(token), kind, file: Arc::clone(file), offset: offset as u64, iovecs, cufile: None }
}

pub(crate) fn submit(backend: &mut dyn Backend, op: Op) {
    assert!(matches!(backend.submit(op), Submit::Queued));
}

/// Reaps everything in flight, by token.
pub(crate) fn reap_all(backend: &mut dyn Backend) -> Vec<Completion> {
    let mut completions = Vec::new();
    while backend.in_flight() > 0 {
        backend.reap(1, &mut completions).unwrap();
    }
    completions.sort_by_key(|completion| completion.op.token);
    completions
}

pub(crate) fn one(backend: &mut dyn Backend, op: Op) -> Completion {
    let token = op.token;
    submit(backend, op);
    let mut completions = reap_all(backend);
    assert_eq!(completions.len(), 1);
    let completion = completions.remove(0);
    assert_eq!(completion.op.token, token);
    completion
}
