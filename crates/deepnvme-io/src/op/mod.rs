//! What a backend is asked to do and what it answers: plain values, no policy.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use deepnvme_mem::Region;
use smallvec::SmallVec;

mod known_file;

pub use self::known_file::KnownFile;

/// Names one accepted op until it comes back; chosen by whoever submits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Token(pub u64);

/// The error number of a failed op, as the kernel gave it (positive).
pub use rustix::io::Errno;

/// The pieces of memory of one op, in file order. One piece is a plain transfer, more are a vectored one.
pub type Pieces = SmallVec<[Region; 1]>;

/// The most pieces that one op may carry (the kernel's `IOV_MAX`).
pub const PIECES_MAX: usize = 1024;

/// File to memory, or memory to file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Direction {
    /// File to memory.
    Read,
    /// Memory to file.
    Write,
}

impl Direction {
    /// The verb that errors and spans use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// The verb of an op.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum OpKind {
    /// File to memory.
    Read,
    /// Memory to file.
    Write,
    /// `fdatasync`: the data and the size, no times.
    SyncData,
    /// `fsync`: everything about the file (of a directory: its names).
    SyncAll,
}

/// One transfer between a contiguous range of a file and a few pieces of contiguous host memory.
///
/// The op owns its memory (each `Region` keeps its owner alive) and its file, so that whoever holds
/// the op holds all that the kernel will touch.
#[derive(Debug)]
pub struct Op {
    /// Comes back in the completion.
    pub token: Token,
    /// What to do.
    pub kind: OpKind,
    /// The open file, direct or buffered; the backend does not care.
    pub file: Arc<OwnedFd>,
    /// Where in the file, in bytes. Unused by the sync kinds.
    pub offset: u64,
    /// Where in memory. Contiguous host regions, none empty. Empty for the sync kinds.
    pub pieces: Pieces,
    /// What cuFile knows the file by, of an op that it is to move.
    pub cufile: Option<KnownFile>,
}

impl Op {
    /// Bytes that a full transfer moves.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.pieces.iter().map(Region::len).sum()
    }

    /// Drops the first `bytes` of the transfer, so that what is left can be submitted again after a short one.
    ///
    /// # Panics
    /// When `bytes` is more than the op carries.
    pub fn advance(&mut self, bytes: usize) {
        assert!(bytes <= self.bytes(), "an op cannot advance past its end");
        self.offset += bytes as u64;
        let mut left = bytes;
        let mut whole = 0;
        while whole < self.pieces.len() && left >= self.pieces[whole].len() {
            left -= self.pieces[whole].len();
            whole += 1;
        }
        self.pieces.drain(..whole);
        if left > 0 {
            let first = &self.pieces[0];
            self.pieces[0] = first.slice(left..first.len());
        }
    }
}

/// Whether a backend took an op.
#[must_use = "a busy backend hands the op back"]
#[derive(Debug)]
pub enum Submit {
    /// The backend owns the op until `reap` hands it back.
    Queued,
    /// The queue is full; reap first.
    Busy(Op),
}

/// An op that has come home.
#[derive(Debug)]
pub struct Completion {
    /// The op as it was submitted, with its memory.
    pub op: Op,
    /// Bytes moved (0 for the sync kinds), or the kernel's refusal.
    pub result: Result<usize, Errno>,
}
