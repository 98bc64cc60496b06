//! The route of each block: direct or buffered, and through the caller's memory, a bounce buffer or cuFile.

use std::ops::Range;

use deepnvme_mem::Alignment;

use super::extents::{FileAlignment, GDS_BYTES_MIN, Segment};
use crate::op::{Direction, IOV_MAX};

/// The descriptor that an op uses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum IoMode {
    /// Bypasses the page cache.
    Direct,
    /// Through the page cache.
    Buffered,
    /// A read of bytes that are in the page cache, on a descriptor that is open for direct I/O otherwise.
    Cached,
}

/// How an op reaches the caller's memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Route {
    /// The caller's memory.
    Caller,
    /// A bounce buffer, with a copy.
    Bounce,
    /// The caller's GPU memory, with cuFile.
    Gds,
}

/// The part of a request that one op moves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Block {
    /// Index into the request's files.
    pub file: usize,
    /// The requested bytes, as a range of the file.
    pub range: Range<u64>,
    /// The bytes that the op moves: `range`, widened to the alignment if a direct read needs it.
    pub io: Range<u64>,
    /// The segments that overlap `range`.
    pub segments: Range<usize>,
    /// The descriptor that the op uses.
    pub mode: IoMode,
    /// The caller's memory, a bounce buffer, or cuFile.
    pub route: Route,
}

/// Chooses the routes of a request's blocks.
pub(super) struct Router<'a> {
    pub(super) direction: Direction,
    pub(super) segments: &'a [Segment],
    pub(super) bounce_bytes: u64,
}

impl Router<'_> {
    /// Chooses the mode and the route of a block, and widens a read that needs it. `direct_alignment` is
    /// what direct I/O requires of this block, or `None` if it goes through the page cache.
    pub(super) fn choose(&self, block: &mut Block, direct_alignment: Option<FileAlignment>, has_gds: bool) {
        if has_gds && self.is_for_gds(block, direct_alignment) {
            (block.mode, block.route) = (IoMode::Direct, Route::Gds);
        } else {
            self.choose_for_host(block, direct_alignment);
        }
    }

    /// Returns whether cuFile moves the block: one contiguous piece of GPU memory, aligned in the file, and large
    /// enough. A block below cuFile's minimum still goes to cuFile if it exceeds a bounce buffer.
    fn is_for_gds(&self, block: &Block, direct_alignment: Option<FileAlignment>) -> bool {
        let ([segment], Some(alignment)) = (&self.segments[block.segments.clone()], direct_alignment) else {
            return false;
        };
        let Range { start, end } = block.range;
        segment.is_contiguous_gpu
            && segment.offset <= start
            && end <= segment.end()
            && end - start >= GDS_BYTES_MIN.min(self.bounce_bytes + 1)
            && alignment.offset.is_aligned(start)
            && alignment.offset.is_aligned(end)
    }

    fn choose_for_host(&self, block: &mut Block, direct_alignment: Option<FileAlignment>) {
        let alignment = direct_alignment.unwrap_or(FileAlignment { memory: Alignment::ONE, offset: Alignment::ONE });
        if direct_alignment.is_some() {
            block.mode = IoMode::Direct;
        }
        if !self.caller_memory_fits(block, alignment) {
            block.route = Route::Bounce;
            if self.direction == Direction::Read {
                let end = block.range.end.next_multiple_of(alignment.offset.bytes());
                block.io = alignment.offset.floor(block.range.start)..end;
            }
        }
    }

    /// Returns whether the op can use the caller's memory: no gap, few iovecs, each contiguous and aligned.
    fn caller_memory_fits(&self, block: &Block, alignment: FileAlignment) -> bool {
        let segments = &self.segments[block.segments.clone()];
        if segments.len() > IOV_MAX {
            return false;
        }
        let mut expected = block.range.start;
        for segment in segments {
            let start = segment.offset.max(block.range.start);
            let end = segment.end().min(block.range.end);
            let Some(address) = segment.address else {
                return false;
            };
            let address = address as u64 + (start - segment.offset);
            let aligned = alignment.offset.is_aligned(start)
                && alignment.offset.is_aligned(end)
                && alignment.memory.is_aligned(address);
            if start != expected || !aligned {
                return false;
            }
            expected = end;
        }
        expected == block.range.end
    }
}
