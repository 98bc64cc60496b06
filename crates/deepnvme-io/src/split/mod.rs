//! Splits a request into blocks: the byte range, the descriptor and the memory of each op.
//!
//! `extents` cuts ranges into blocks, and `route` chooses how each block moves. Both are arithmetic on values. Blocks
//! are computed one at a time, by index, so submitting a request takes the same time whatever its size.
//!
//! Rules for a file that is open for direct I/O:
//! - Blocks end at multiples of the block size, counted from the start of the file or stripe, and at stripe ends. If
//!   the middle of a long range moves directly to or from one piece of the caller's memory, its blocks are larger than
//!   a bounce buffer, since fewer ops cost less CPU time.
//! - A *read* block whose range or memory is not aligned widens its range and goes through a bounce buffer.
//! - cuFile's blocks are cut like those that use the caller's memory directly.
//! - A *write* never widens. The ragged edges of a range go through the page cache, where the kernel merges them with
//!   the neighbouring bytes under its own lock. Direct writes cover whole pages only and never share a page with an
//!   edge, so concurrent requests to adjacent ranges cannot lose each other's bytes.

mod extents;
mod route;

use std::ops::Range;

use deepnvme_mem::PAGE_BYTES;

pub use self::extents::{BlockSizes, FileAlignment, FileGeometry, GDS_BYTES_MIN, Segment};
use self::extents::{Extent, invalid};
use self::route::Router;
pub use self::route::{Block, IoMode, Route};
use crate::error::Result;
use crate::op::Direction;

/// Largest gap between two ranges of one read that is read rather than skipped.
pub const GAP_BYTES_MAX: u64 = PAGE_BYTES;

/// A request, divided into blocks on demand.
#[derive(Clone, Debug)]
pub struct BlockPlan {
    direction: Direction,
    bounce_bytes: u64,
    segments: Vec<Segment>,
    extents: Vec<Extent>,
    block_count: u64,
    bytes_total: u64,
}

impl BlockPlan {
    /// Plans a request: sorts its segments by file and offset, and joins adjacent ones.
    ///
    /// # Errors
    /// `InvalidInput` if a range ends at 2^63 or beyond, two ranges of a write overlap, or the size of blocks or
    /// stripes is no multiple of a file's alignment.
    pub fn new(
        direction: Direction,
        geometries: &[FileGeometry],
        mut segments: Vec<Segment>,
        sizes: BlockSizes,
    ) -> Result<Self> {
        let too_far = |s: &Segment| s.offset.checked_add(s.len).is_none_or(|end| end > i64::MAX as u64);
        if let Some(segment) = segments.iter().find(|segment| too_far(segment)) {
            return Err(invalid(direction, "the range ends beyond the largest file offset").at_offset(segment.offset));
        }
        segments.retain(|segment| segment.len > 0);
        let bytes_total = segments.iter().map(|segment| segment.len).sum();
        if !segments.is_sorted_by_key(|segment| (segment.file, segment.offset)) {
            segments.sort_unstable_by_key(|segment| (segment.file, segment.offset));
        }
        let bounce_bytes = sizes.bounce_bytes;
        let mut plan = Self { direction, bounce_bytes, segments, extents: Vec::new(), block_count: 0, bytes_total };
        let mut start = 0;
        for end in 1..=plan.segments.len() {
            if end < plan.segments.len() && plan.joins(end)? {
                continue;
            }
            let geometry = geometries[plan.segments[start].file as usize];
            let mut extent = Extent::new(direction, &plan.segments, start..end, geometry, sizes)?;
            extent.blocks_before = plan.block_count;
            plan.block_count += extent.block_count();
            plan.extents.push(extent);
            start = end;
        }
        Ok(plan)
    }

    /// Returns whether the segment at `index` continues the previous one.
    fn joins(&self, index: usize) -> Result<bool> {
        let (before, this) = (&self.segments[index - 1], &self.segments[index]);
        if before.file != this.file {
            return Ok(false);
        }
        if self.direction == Direction::Write && this.offset < before.end() {
            let detail = "two ranges of one batch overlap; write them one after the other";
            return Err(invalid(self.direction, detail).at_offset(this.offset));
        }
        let gap_max = if self.direction == Direction::Read { GAP_BYTES_MAX } else { 0 };
        Ok(this.offset >= before.end() && this.offset - before.end() <= gap_max)
    }

    /// Returns the direction.
    #[must_use]
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// Returns the number of blocks.
    #[must_use]
    pub fn block_count(&self) -> u64 {
        self.block_count
    }

    /// Returns the number of requested bytes, without gaps and without widening.
    #[must_use]
    pub fn bytes_total(&self) -> u64 {
        self.bytes_total
    }

    /// Returns the segments in file order.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Returns the block with this index.
    ///
    /// # Panics
    /// If `index` is not below [`block_count`](Self::block_count).
    #[must_use]
    pub fn block(&self, index: u64) -> Block {
        assert!(index < self.block_count, "block {index} of {}", self.block_count);
        let at = self.extents.partition_point(|extent| extent.blocks_before <= index) - 1;
        let extent = &self.extents[at];
        let (range, is_edge) = extent.block_range(index - extent.blocks_before);
        let inside = &self.segments[extent.segments.clone()];
        let first = extent.segments.start + inside.partition_point(|segment| segment.end() <= range.start);
        let last = extent.segments.start + inside.partition_point(|segment| segment.offset < range.end);
        let mut block = Block {
            file: self.segments[extent.segments.start].file as usize,
            io: range.clone(),
            range,
            segments: first..last,
            mode: IoMode::Buffered,
            route: Route::Caller,
        };
        // A read may widen its edges. A write leaves the neighbouring bytes to the page cache.
        let is_buffered = is_edge && self.direction == Direction::Write;
        let direct = extent.geometry.direct.filter(|_| !is_buffered);
        let router = Router { direction: self.direction, segments: &self.segments, bounce_bytes: self.bounce_bytes };
        router.choose(&mut block, direct, extent.geometry.has_gds);
        block
    }

    /// Returns the range from a block's start to the end of its extent, at most `bytes_max` long unless the block is
    /// longer.
    #[must_use]
    pub fn rest_of_extent(&self, block: &Block, bytes_max: u64) -> Range<u64> {
        let at = self.extents.partition_point(|extent| extent.segments.start <= block.segments.start) - 1;
        let Range { start, end } = block.range;
        start..self.extents[at].range().end.min(start.saturating_add(bytes_max)).max(end)
    }

    /// Returns a read block with its bytes to come from the page cache: not widened, and into the caller's memory if
    /// that takes few iovecs.
    #[must_use]
    pub fn through_cache(&self, block: Block) -> Block {
        let io = block.range.clone();
        let mut block = Block { io, mode: IoMode::Cached, route: Route::Caller, ..block };
        let router = Router { direction: self.direction, segments: &self.segments, bounce_bytes: self.bounce_bytes };
        router.choose(&mut block, None, false);
        block
    }
}
