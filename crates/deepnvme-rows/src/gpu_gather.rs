//! Gathers for a GPU: rows pass through pinned memory, a part of them at a time.
//!
//! While one part is copied to the GPU, the next ones are gathered.

use std::collections::VecDeque;

use deepnvme_io::mem::RegionMut;
use deepnvme_io::{StartedCopy, StreamEvents};

use crate::error::{Error, Result};
use crate::host_gather::Gather;
use crate::pinned_pieces::PinnedPiece;
use crate::row_writer::{Conversion, RowWriter};
use crate::store::RowStore;

/// Pieces that are left to gathers that a thread runs.
const PIECES_RESERVED: usize = 1;

/// A gather for a GPU that has begun.
#[derive(Debug)]
pub(crate) struct GpuGather {
    conversion: Option<Conversion>,
    /// The work before which the target must not change. `None` once it is done.
    earlier: Option<StreamEvents>,
    row_bytes: usize,
    /// The first row that is in no part yet.
    next: usize,
    /// Parts that are being gathered.
    begun: VecDeque<Part>,
    copying: Option<(StartedCopy, PinnedPiece)>,
}

/// Some of the rows on their way into pinned memory.
#[derive(Debug)]
struct Part {
    first: usize,
    rows: usize,
    gather: Gather,
    piece: PinnedPiece,
}

impl GpuGather {
    /// Begins the first part, if a piece is free. Its order in the target's stream is that of this call.
    pub(crate) fn begin(
        store: &RowStore,
        rows: &[u64],
        target: &RegionMut,
        conversion: Option<Conversion>,
    ) -> Result<Self> {
        store.check_open()?;
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
        gather.begin_part(store, rows, PIECES_RESERVED)?;
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
            if self.begun.is_empty() && !self.begin_part(store, rows, 0)? {
                // Its own piece returns before it waits for those of others.
                if self.copying.is_some() {
                    self.end_copy()?;
                } else if self.next == rows.len() {
                    return Ok(());
                } else if should_stop() {
                    return Err(Error::Interrupted);
                } else {
                    store.pinned.wait();
                }
                continue;
            }
            self.look_ahead(store, rows)?;
            let is_gathered = match self.begun.front_mut() {
                Some(Part { rows, gather, piece, .. }) => {
                    gather.step(store, &mut gather.writer(store, *rows, &piece.memory)?, should_stop)?
                }
                None => false,
            };
            if is_gathered && let Some(part) = self.begun.pop_front() {
                self.copy(store, part, target)?;
            }
        }
    }

    /// Once all reads of a part have started, starts those of the next one, as far as buffers and pieces are free.
    fn look_ahead(&mut self, store: &RowStore, rows: &[u64]) -> Result<()> {
        let mut index = 1;
        while self.begun.get(index - 1).is_some_and(|part| part.gather.has_started_all()) {
            if let Some(Part { rows, gather, piece, .. }) = self.begun.get_mut(index) {
                gather.start_some(store, &mut gather.writer(store, *rows, &piece.memory)?)?;
            } else if !self.begin_part(store, rows, PIECES_RESERVED)? {
                break;
            }
            index += 1;
        }
        Ok(())
    }

    /// Ends the reads of a gather that is not finished.
    pub(crate) fn abandon(&mut self, store: &RowStore) {
        self.begun.drain(..).for_each(|mut part| part.gather.abandon(store));
    }

    /// Begins the next part. Returns false if there is none, or unless `rest` other pieces are free after that.
    fn begin_part(&mut self, store: &RowStore, rows: &[u64], rest: usize) -> Result<bool> {
        let count = (store.pinned.piece_bytes() / self.row_bytes.max(1)).min(rows.len() - self.next);
        if count == 0 {
            return Ok(false);
        }
        let Some(piece) = store.pinned.try_take(count * self.row_bytes, rest)? else { return Ok(false) };
        let gather = store.begin_on_host(&rows[self.next..self.next + count], &piece.memory, self.conversion)?;
        self.begun.push_back(Part { first: self.next, rows: count, gather, piece });
        self.next += count;
        Ok(true)
    }

    /// Starts to copy a part whose rows are there.
    fn copy(&mut self, store: &RowStore, part: Part, target: &RegionMut) -> Result<()> {
        if let Some(earlier) = &self.earlier {
            earlier.wait()?;
            self.earlier = None;
        }
        self.end_copy()?;
        let host = part.piece.memory.region();
        let copy = store.engine.gpu_access().start_copy_to_gpu(target, part.first * self.row_bytes, host)?;
        self.copying = Some((copy, part.piece));
        Ok(())
    }

    /// Waits for the copy in flight, and returns its piece.
    fn end_copy(&mut self) -> Result<()> {
        self.copying.take().map_or(Ok(()), |(copy, _piece)| Ok(copy.wait()?))
    }
}
