//! Pinned memory between rows and a GPU, in a bounded number of pieces.

use std::sync::Arc;

use deepnvme_io::mem::{Buffer, RegionMut};
use deepnvme_io::{Error as IoError, register_with_driver};

use crate::error::{Error, Result};
use crate::staging::Staging;

/// The size of a piece, unless a row needs more.
const PIECE_BYTES: usize = 2 << 20;
const PIECES: usize = 4;
/// A converted row has at most this many times its bytes on disk.
const WIDENED: usize = 4;

/// The pieces of a table, each made when it is first needed.
#[derive(Debug)]
pub(crate) struct PinnedPieces {
    pool: Arc<Staging<RegionMut>>,
}

/// A piece in use. Dropping it returns it.
#[derive(Debug)]
pub(crate) struct PinnedPiece {
    pub(crate) memory: RegionMut,
    rest: RegionMut,
    pool: Arc<Staging<RegionMut>>,
}

impl PinnedPieces {
    /// Creates the pieces for a table with rows of this size.
    pub(crate) fn new(row_bytes: usize) -> Self {
        let make = |bytes| Buffer::zeroed(bytes).map(|buffer| register_with_driver(buffer.into_region()));
        let piece_bytes = PIECE_BYTES.max(row_bytes.saturating_mul(WIDENED));
        Self { pool: Arc::new(Staging::new(piece_bytes, PIECES, make)) }
    }

    /// Returns the size of a piece.
    pub(crate) fn piece_bytes(&self) -> usize {
        self.pool.buffer_bytes()
    }

    /// Takes a piece, and makes this many of its bytes its memory. `None` unless `rest` others are free after that.
    pub(crate) fn try_take(&self, bytes: usize, rest: usize) -> Result<Option<PinnedPiece>> {
        let taken = self.pool.try_take(rest).map_err(|error| Error::Io(IoError::from_io("allocate", &error)))?;
        Ok(taken.map(|piece| {
            let (memory, rest) = piece.split_at(bytes);
            PinnedPiece { memory, rest, pool: Arc::clone(&self.pool) }
        }))
    }

    /// Waits for a returned piece, for a while.
    pub(crate) fn wait(&self) {
        self.pool.wait(0);
    }
}

impl Drop for PinnedPiece {
    fn drop(&mut self) {
        let [memory, rest] = [&mut self.memory, &mut self.rest].map(|part| std::mem::replace(part, empty()));
        self.pool.put_back(memory.join(rest).ok());
    }
}

fn empty() -> RegionMut {
    RegionMut::from_vec(Vec::new())
}
