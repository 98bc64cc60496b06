//! Compares all blocks of a packed table with their checksums.

use std::collections::VecDeque;
use std::ops::Range;

use deepnvme_io::mem::{Buffer, RegionMut};
use deepnvme_io::{Error as IoError, ErrorKind, Transfer};

use crate::error::{Error, Result};
use crate::fetch::{BlockChecks, join};
use crate::read_plan::Run;
use crate::staging::POLL_INTERVAL;
use crate::store::RowStore;

/// Reads in flight.
const DEPTH: usize = 4;

/// A piece of the table on its way.
struct Piece {
    range: Range<u64>,
    transfer: Transfer<RegionMut>,
    rest: RegionMut,
}

impl RowStore {
    /// Reads all blocks of a packed table, and compares them with their checksums. Returns the number of blocks.
    /// `progress` gets the bytes of each piece.
    ///
    /// # Errors
    /// `Checksum` for the first damaged block. `Invalid` if the table is not packed: its rows have no checksums. `Changed`,
    /// `Io`, `Closed` and `Interrupted` as in [`gather`](Self::gather).
    pub fn verify(&self, progress: &dyn Fn(u64), should_stop: &dyn Fn() -> bool) -> Result<u64> {
        self.check_open()?;
        let Some(blocks) = self.table.blocks() else {
            return Err(Error::Invalid("rows that are read in place have no checksums; pack the table".into()));
        };
        let range = self.table.ranges()[0];
        let end = self.table.end_of(&range);
        let (mut next, mut pieces) = (range.offset, VecDeque::new());
        let verified = loop {
            match self.verify_next((&mut next, end), &mut pieces, progress, should_stop) {
                Ok(true) => {}
                Ok(false) => break Ok(blocks.blocks(range.rows)),
                Err(error) => break Err(error),
            }
        };
        for piece in pieces {
            piece.transfer.cancel();
            let (memory, _) = piece.transfer.wait();
            self.staging.put_back(whole_of(memory, piece.rest));
        }
        verified
    }

    /// Starts reads as far as buffers are free, and verifies the first. Returns false at the end.
    fn verify_next(
        &self,
        (next, end): (&mut u64, u64),
        pieces: &mut VecDeque<Piece>,
        progress: &dyn Fn(u64),
        should_stop: &dyn Fn() -> bool,
    ) -> Result<bool> {
        self.check_open()?;
        let file = self.table.ranges()[0].file;
        while *next < end
            && pieces.len() < DEPTH
            && let Some(buffer) = self.take_buffer(0)?
        {
            let alignment = self.table.alignment();
            let bytes = (buffer.len() as u64 / alignment * alignment).min(end - *next);
            let (target, rest) = buffer.into_region().split_at(bytes as usize);
            match self.engine.try_read(self.files[file].file(), *next, target) {
                Ok(transfer) => pieces.push_back(Piece { range: *next..*next + bytes, transfer, rest }),
                Err(refused) => {
                    self.staging.put_back(whole_of(refused.memory, rest));
                    return Err(refused.error.into());
                }
            }
            *next += bytes;
        }
        let Some(piece) = pieces.front() else {
            if *next < end {
                self.staging.wait(0);
            }
            return if should_stop() { Err(Error::Interrupted) } else { Ok(*next < end) };
        };
        while !piece.transfer.wait_timeout(POLL_INTERVAL) {
            piece.transfer.check_process()?;
            if should_stop() {
                return Err(Error::Interrupted);
            }
        }
        if let Some(Piece { range, transfer, rest }) = pieces.pop_front() {
            let (memory, result) = transfer.wait();
            let buffer = whole_of(memory, rest);
            let bytes = range.end - range.start;
            let checked = result.map_err(Error::from).and_then(|_| self.check(range, buffer.as_ref()));
            self.staging.put_back(buffer);
            checked?;
            progress(bytes);
        }
        if should_stop() { Err(Error::Interrupted) } else { Ok(true) }
    }

    fn check(&self, range: Range<u64>, buffer: Option<&Buffer>) -> Result<()> {
        let first = self.table.ranges()[0];
        self.check_unchanged(first.file)?;
        let (Some(checker), Some(buffer)) = (self.table.checker(), buffer) else {
            let detail = "the engine did not return the buffer of a read; report this as a bug";
            return Err(IoError::new(ErrorKind::Io, "read", detail).into());
        };
        let run = Run { file: first.file, range, start: 0 };
        let rows = self.table.rows();
        BlockChecks { checker, start: first.offset, rows, runs: vec![run] }.check(buffer.as_slice(), &self.files)
    }
}

fn whole_of(memory: Option<RegionMut>, rest: RegionMut) -> Option<Buffer> {
    join(vec![memory?], vec![rest])
}
