//! Ops and their completions: plain values, no policy.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use deepnvme_mem::Region;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

mod registered_file;

pub use self::registered_file::RegisteredFile;

/// Identifies an accepted op until its completion. Chosen by the submitter.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Token(pub u64);

/// The error number of a failed op, as the kernel returned it (positive).
pub use rustix::io::Errno;

/// The iovecs of an op: ranges of memory, in file order. One is a plain transfer, several are a vectored one.
pub type Iovecs = SmallVec<[Region; 1]>;

/// The maximum iovecs of one op, as in Linux.
pub const IOV_MAX: usize = 1024;

/// The direction of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Direction {
    /// File to memory.
    Read,
    /// Memory to file.
    Write,
}

impl Direction {
    /// Returns the verb for errors and spans.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// The kind of an op.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum OpKind {
    /// File to memory.
    Read,
    /// Memory to file.
    Write,
    /// `fdatasync`: the data and the size, without timestamps.
    SyncData,
    /// `fsync`: everything about the file (for a folder: its names).
    SyncAll,
}

/// One read, write or sync. The memory is host memory, or one range of GPU memory if `cufile` is set.
///
/// The op owns its memory (each `Region` keeps its owner alive) and its file. Its holder therefore holds everything
/// that the kernel accesses.
#[derive(Debug)]
pub struct Op {
    /// Chosen by the submitter, and returned in the completion.
    pub token: Token,
    /// The kind.
    pub kind: OpKind,
    /// The open file, direct or buffered. Backends treat both equally.
    pub file: Arc<OwnedFd>,
    /// The file offset, in bytes. Unused by the sync kinds.
    pub offset: u64,
    /// The memory: contiguous regions, none empty. No regions for the sync kinds.
    pub iovecs: Iovecs,
    /// The file's registration with cuFile, if cuFile moves the op.
    pub cufile: Option<RegisteredFile>,
}

impl Op {
    /// Returns the bytes of a full transfer.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.iovecs.iter().map(Region::len).sum()
    }

    /// Drops the first `bytes` of the transfer, so that the rest can be submitted again after a short one.
    ///
    /// # Panics
    /// If `bytes` is more than the op contains.
    pub fn advance(&mut self, bytes: usize) {
        assert!(bytes <= self.bytes(), "an op cannot advance past its end");
        self.offset += bytes as u64;
        let mut left = bytes;
        let mut whole = 0;
        while whole < self.iovecs.len() && left >= self.iovecs[whole].len() {
            left -= self.iovecs[whole].len();
            whole += 1;
        }
        self.iovecs.drain(..whole);
        if left > 0 {
            let first = &self.iovecs[0];
            self.iovecs[0] = first.slice(left..first.len());
        }
    }
}

/// When ops reach the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SubmitMode {
    /// Several with one system call.
    #[default]
    Batch,
    /// Each with its own system call.
    Single,
}

/// The outcome of a submission.
#[must_use = "a busy backend returns the op"]
#[derive(Debug)]
pub enum Submit {
    /// The backend owns the op until `reap` returns it.
    Queued,
    /// The queue is full; reap first.
    Busy(Op),
}

/// A completed op.
#[derive(Debug)]
pub struct Completion {
    /// The op as it was submitted, with its memory.
    pub op: Op,
    /// Bytes moved (0 for the sync kinds), or the kernel's error.
    pub result: Result<usize, Errno>,
}
