//! Gathers for a GPU: rows pass through pinned host memory, piece by piece.
//!
//! While one piece is copied to the GPU, the next ones are gathered.

use std::collections::VecDeque;
use std::sync::Arc;

use deepnvme_io::mem::{Buffer, RegionMut};
use deepnvme_io::{Error as IoError, StartedCopy, StreamEvents, register_with_driver};

use crate::error::{Error, Result};
use crate::gather::Gather;
use crate::row_writer::{Conversion, RowWriter};
use crate::staging::Staging;
use crate::store::RowStore;

/// The size of a piece, unless a row needs more.
const PIECE_BYTES: usize = 2 << 20;
/// Pieces of a table.
const PIECES: usize = 4;
/// Pieces that are left to gathers that a thread runs.
const PIECES_RESERVED: usize = 1;
/// A converted row has at most this many times its bytes on disk.
const WIDENED: usize = 4;

/// Creates the pieces for a table with rows of this size, each when it is first needed.
pub(crate) fn host_pieces(row_bytes: usize) -> Arc<Staging<RegionMut>> {
    let make = |bytes| Buffer::zeroed(bytes).map(|buffer| register_with_driver(buffer.into_region()));
    Arc::new(Staging::new(PIECE_BYTES.max(row_bytes.saturating_mul(WIDENED)), PIECES, make))
}

/// A gather for a GPU that has begun.
#[derive(Debug)]
pub(crate) struct GpuGather {
    conversion: Option<Conversion>,
    /// The work before which the target must not change. `None` once it is done.
    earlier: Option<StreamEvents>,
    row_bytes: usize,
    /// The first row that is in no piece yet.
    next: usize,
    /// Pieces that are being gathered.
    begun: VecDeque<Piece>,
    copying: Option<(StartedCopy, HostMemory)>,
}

/// Some of the rows on their way into host memory.
#[derive(Debug)]
struct Piece {
    first: usize,
    rows: usize,
    gather: Gather,
    memory: HostMemory,
}

/// Host memory that returns to its pool.
#[derive(Debug)]
struct HostMemory {
    /// The part that the rows fill.
    region: RegionMut,
    rest: RegionMut,
    pool: Arc<Staging<RegionMut>>,
}

impl GpuGather {
    /// Begins the first piece, if memory for it is free. Its order in the target's stream is that of this call.
    pub(crate) fn begin(
        store: &RowStore,
        rows: &[u64],
        target: &RegionMut,
        conversion: Option<Conversion>,
    ) -> Result<Self> {
        store.check_call(rows)?;
        let scales = store.scales.as_ref();
        let writer = RowWriter::new(target, rows.len(), store.table.row_bytes(), conversion, scales)?;
        let earlier = store.engine.gpu_access().record_events([&target.region()])?;
        let mut gather = Self {
            conversion,
            earlier: Some(earlier),
            row_bytes: writer.row_bytes(),
            next: 0,
            begun: VecDeque::new(),
            copying: None,
        };
        gather.begin_piece(store, rows, PIECES_RESERVED)?;
        Ok(gather)
    }

    /// Gathers and copies all that is left. After `Interrupted`, it can be called again.
    pub(crate) fn run(
        &mut self,
        store: &RowStore,
        rows: &[u64],
        target: &RegionMut,
        should_stop: &dyn Fn() -> bool,
    ) -> Result<()> {
        loop {
            if self.begun.is_empty() && !self.begin_piece(store, rows, 0)? {
                // Its own memory returns before it waits for that of others.
                if self.copying.is_some() {
                    self.end_copy()?;
                } else if self.next == rows.len() {
                    return Ok(());
                } else if should_stop() {
                    return Err(Error::Interrupted);
                } else {
                    store.host_pieces.wait();
                }
                continue;
            }
            self.look_ahead(store, rows)?;
            let is_gathered = match self.begun.front_mut() {
                Some(Piece { rows, gather, memory, .. }) => {
                    gather.step(store, &mut gather.writer(store, *rows, &memory.region)?, should_stop)?
                }
                None => false,
            };
            if is_gathered && let Some(piece) = self.begun.pop_front() {
                self.copy(store, piece, target)?;
            }
        }
    }

    /// Once all reads of a piece have started, starts those of the next one, as far as buffers and memory are free.
    fn look_ahead(&mut self, store: &RowStore, rows: &[u64]) -> Result<()> {
        let mut index = 1;
        while self.begun.get(index - 1).is_some_and(|piece| piece.gather.has_started_all()) {
            if let Some(Piece { rows, gather, memory, .. }) = self.begun.get_mut(index) {
                gather.start_some(store, &mut gather.writer(store, *rows, &memory.region)?)?;
            } else if !self.begin_piece(store, rows, PIECES_RESERVED)? {
                break;
            }
            index += 1;
        }
        Ok(())
    }

    /// Ends the reads of a gather that is not finished.
    pub(crate) fn abandon(&mut self, store: &RowStore) {
        self.begun.drain(..).for_each(|mut piece| piece.gather.abandon(store));
    }

    /// Begins the next piece. Returns false if there is none, or if less than `rest` other memory would be free.
    fn begin_piece(&mut self, store: &RowStore, rows: &[u64], rest: usize) -> Result<bool> {
        let pool = &store.host_pieces;
        let count = (pool.buffer_bytes() / self.row_bytes.max(1)).min(rows.len() - self.next);
        if count == 0 {
            return Ok(false);
        }
        let allocation = |error: std::io::Error| Error::Io(IoError::from_io("allocate", &error));
        let Some(memory) = pool.try_take(rest).map_err(allocation)? else { return Ok(false) };
        let (region, rest) = memory.split_at(count * self.row_bytes);
        let memory = HostMemory { region, rest, pool: Arc::clone(pool) };
        let gather = store.begin_on_host(&rows[self.next..self.next + count], &memory.region, self.conversion)?;
        self.begun.push_back(Piece { first: self.next, rows: count, gather, memory });
        self.next += count;
        Ok(true)
    }

    /// Starts to copy a piece whose rows are there.
    fn copy(&mut self, store: &RowStore, piece: Piece, target: &RegionMut) -> Result<()> {
        if let Some(earlier) = &self.earlier {
            earlier.wait()?;
            self.earlier = None;
        }
        self.end_copy()?;
        let host = piece.memory.region.region();
        let copy = store.engine.gpu_access().start_copy_to_gpu(target, piece.first * self.row_bytes, host)?;
        self.copying = Some((copy, piece.memory));
        Ok(())
    }

    /// Waits for the copy in flight, and returns its memory.
    fn end_copy(&mut self) -> Result<()> {
        self.copying.take().map_or(Ok(()), |(copy, _memory)| Ok(copy.wait()?))
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        let [region, rest] = [&mut self.region, &mut self.rest].map(|part| std::mem::replace(part, empty()));
        self.pool.put_back(region.join(rest).ok());
    }
}

fn empty() -> RegionMut {
    RegionMut::from_vec(Vec::new())
}
