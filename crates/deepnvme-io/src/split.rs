//! Splits a request into blocks: the byte range, the descriptor and the memory of each op.
//!
//! This module is arithmetic on values. Blocks are computed one at a time, by index, so submitting a request takes the
//! same time whatever its size.
//!
//! Rules for a file that is open for direct I/O:
//! - Blocks end at multiples of the block size, counted from the start of the file or stripe, and at stripe ends. If
//!   all of a long range moves directly to or from the caller's memory, blocks are larger than a bounce buffer, since
//!   fewer ops cost less CPU time.
//! - A *read* block whose range or memory is not aligned widens its range and goes through a bounce buffer.
//! - cuFile's blocks are cut like those that use the caller's memory directly.
//! - A *write* never widens. The ragged edges of a range, up to the page that contains them, go through the page cache,
//!   where the kernel merges them with their neighbours under its own lock. Direct writes therefore never share a page
//!   with an edge, so concurrent requests to adjacent ranges cannot lose each other's bytes.

use std::ops::Range;

use deepnvme_mem::Alignment;

use crate::config::limits::BLOCK_BYTES_MIN;
use crate::error::{Error, ErrorKind, Result};
use crate::layout::Layout;
use crate::op::PIECES_MAX;

pub use crate::op::Direction;

/// Largest gap between two ranges of one read that is read rather than skipped.
pub const GAP_BYTES_MAX: u64 = 4096;

/// Minimum bytes of a block for cuFile. The latency of cuFile's calls would dominate smaller ones, so they go through a
/// bounce buffer.
pub const GDS_BYTES_MIN: u64 = 64 << 10;

/// Minimum blocks per range while blocks are larger than a bounce buffer, so that all workers and the device's queue
/// have work.
const LONG_BLOCKS_MIN: u64 = 16;

/// Block sizes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockSizes {
    /// Maximum bytes of a block that uses the caller's memory.
    pub block_bytes: u64,
    /// Maximum bytes of a block that may need a bounce buffer. At most `block_bytes`.
    pub slot_bytes: u64,
    /// Maximum bytes of a block for cuFile.
    pub gds_bytes: u64,
}

impl BlockSizes {
    /// Returns one size for all kinds of blocks.
    #[must_use]
    pub const fn same(bytes: u64) -> Self {
        Self { block_bytes: bytes, slot_bytes: bytes, gds_bytes: bytes }
    }
}

/// The alignment that direct I/O on a file requires.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileAlignment {
    /// Alignment of memory addresses.
    pub memory: Alignment,
    /// Alignment of file offsets and lengths.
    pub offset: Alignment,
}

/// The properties of a file that splitting depends on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// `None` if the file goes through the page cache.
    pub direct: Option<FileAlignment>,
    /// The layout of the file over its parts.
    pub layout: Layout,
    /// Whether cuFile moves bytes between the file and GPUs.
    pub has_gds: bool,
}

/// One tensor's range of one file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Index into the request's files.
    pub file: u32,
    /// Index into the request's memory, in the caller's order.
    pub item: u32,
    /// Offset in the file.
    pub offset: u64,
    /// Length in bytes. Not 0.
    pub len: u64,
    /// Address in memory, or `None` if the memory is not contiguous.
    pub address: Option<usize>,
    /// Whether the memory is contiguous on a GPU.
    pub is_flat_gpu: bool,
}

impl Segment {
    fn end(&self) -> u64 {
        self.offset + self.len
    }
}

/// The descriptor that an op goes through.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Channel {
    /// Bypasses the page cache.
    Direct,
    /// Through the page cache.
    Buffered,
}

/// The memory that an op uses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Via {
    /// The caller's memory.
    Caller,
    /// A bounce buffer, with a copy.
    Slot,
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
    /// Direct or buffered.
    pub channel: Channel,
    /// Caller's memory or bounce buffer.
    pub via: Via,
}

/// A run of adjacent segments, as one range of one file. Reads allow small gaps.
#[derive(Clone, Debug)]
struct Extent {
    segments: Range<usize>,
    range: Range<u64>,
    units: Units,
    geometry: Geometry,
    /// The page-aligned middle between ragged edges that are separate blocks, of a direct write, or of a long read
    /// whose middle needs no bounce buffer. `None` if every cut is at a unit.
    middle: Option<Range<u64>>,
    blocks_before: u64,
}

/// A request, divided into blocks on demand.
#[derive(Clone, Debug)]
pub struct Plan {
    direction: Direction,
    slot_bytes: u64,
    segments: Vec<Segment>,
    extents: Vec<Extent>,
    block_count: u64,
    bytes_total: u64,
}

impl Plan {
    /// Plans a request: sorts its segments by file and offset, and joins adjacent ones.
    ///
    /// # Errors
    /// `InvalidInput` if a range ends beyond 2^63, two writes overlap, or a file's alignment exceeds the block size.
    pub fn new(
        direction: Direction,
        geometries: &[Geometry],
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
        let slot_bytes = sizes.slot_bytes;
        let mut plan = Self { direction, slot_bytes, segments, extents: Vec::new(), block_count: 0, bytes_total };
        let mut start = 0;
        for end in 1..=plan.segments.len() {
            if end < plan.segments.len() && plan.joins(end)? {
                continue;
            }
            plan.push_extent(start..end, geometries, sizes)?;
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

    fn push_extent(&mut self, segments: Range<usize>, geometries: &[Geometry], sizes: BlockSizes) -> Result<()> {
        let first = self.segments[segments.start];
        let range = first.offset..self.segments[segments.end - 1].end();
        let geometry = geometries[first.file as usize];
        let stripe_bytes = geometry.layout.stripe_bytes;
        let mut units = Units::new(sizes.slot_bytes, stripe_bytes, BLOCK_BYTES_MIN);
        let mut middle = None;
        if let Some(alignment) = geometry.direct {
            let page_bytes = alignment.offset.bytes().max(BLOCK_BYTES_MIN);
            let setting = match (sizes.slot_bytes.is_multiple_of(page_bytes), stripe_bytes) {
                (false, _) => Some("block_bytes"),
                (true, u64::MAX) => None,
                (true, stripe_bytes) => (!stripe_bytes.is_multiple_of(page_bytes)).then_some("stripe_bytes"),
            };
            if let Some(setting) = setting {
                let detail =
                    format!("the file's direct I/O alignment is {page_bytes} bytes; set {setting} to a multiple of it");
                return Err(invalid(self.direction, &detail));
            }
            units = Units::new(sizes.slot_bytes, stripe_bytes, page_bytes);
            let inner = range.start.next_multiple_of(page_bytes)..range.end / page_bytes * page_bytes;
            let inside = &self.segments[segments.clone()];
            let long_bytes = match inside {
                [segment] if segment.is_flat_gpu && geometry.has_gds => gds_block_bytes(&inner, sizes),
                _ => long_block_bytes(inside, &inner, alignment, sizes),
            };
            if let Some(bytes) = long_bytes {
                units = Units::new(bytes / page_bytes * page_bytes, stripe_bytes, page_bytes);
            }
            if inner != range && (self.direction == Direction::Write || long_bytes.is_some()) {
                middle = Some(inner);
            }
        }
        let mut extent = Extent { segments, range, units, geometry, middle, blocks_before: self.block_count };
        self.block_count += extent.block_count();
        extent.blocks_before = self.block_count - extent.block_count();
        self.extents.push(extent);
        Ok(())
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

    /// Returns the number of requested bytes.
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
            channel: Channel::Buffered,
            via: Via::Caller,
        };
        // A read may widen its edges. A write leaves the neighbouring bytes to the page cache.
        let is_buffered = is_edge && self.direction == Direction::Write;
        let direct = extent.geometry.direct.filter(|_| !is_buffered);
        if extent.geometry.has_gds && self.is_for_gds(&block, direct) {
            (block.channel, block.via) = (Channel::Direct, Via::Gds);
        } else {
            self.route(&mut block, direct);
        }
        block
    }

    /// Returns whether cuFile moves the block: one contiguous piece of GPU memory, aligned in the file, and large
    /// enough. A block below cuFile's minimum still goes to cuFile if it exceeds a bounce buffer.
    fn is_for_gds(&self, block: &Block, direct: Option<FileAlignment>) -> bool {
        let ([segment], Some(alignment)) = (&self.segments[block.segments.clone()], direct) else { return false };
        let Range { start, end } = block.range;
        segment.is_flat_gpu
            && segment.offset <= start
            && end <= segment.end()
            && end - start >= GDS_BYTES_MIN.min(self.slot_bytes + 1)
            && alignment.offset.is_aligned(start)
            && alignment.offset.is_aligned(end)
    }

    /// Chooses the channel and memory of a block, and widens a read that needs it.
    fn route(&self, block: &mut Block, direct: Option<FileAlignment>) {
        let alignment = direct.unwrap_or(FileAlignment { memory: Alignment::ONE, offset: Alignment::ONE });
        if direct.is_some() {
            block.channel = Channel::Direct;
        }
        if !self.caller_memory_fits(block, alignment) {
            block.via = Via::Slot;
            if self.direction == Direction::Read {
                let end = block.range.end.next_multiple_of(alignment.offset.bytes());
                block.io = alignment.offset.floor(block.range.start)..end;
            }
        }
    }

    /// Returns whether the op can use the caller's memory: no gap, few pieces, each contiguous and aligned.
    fn caller_memory_fits(&self, block: &Block, alignment: FileAlignment) -> bool {
        let segments = &self.segments[block.segments.clone()];
        if segments.len() > PIECES_MAX {
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

impl Extent {
    fn block_count(&self) -> u64 {
        match &self.middle {
            None => self.units.count(&self.range),
            Some(middle) if middle.start > middle.end => 1,
            Some(middle) => {
                let head = u64::from(middle.start > self.range.start);
                let tail = u64::from(self.range.end > middle.end);
                head + self.units.count(middle) + tail
            }
        }
    }

    /// Returns the range of the extent's block with this index, and whether it is a ragged edge.
    fn block_range(&self, index: u64) -> (Range<u64>, bool) {
        let Some(middle) = &self.middle else {
            return (self.units.get(&self.range, index), false);
        };
        if middle.start > middle.end {
            return (self.range.clone(), true);
        }
        let head = u64::from(middle.start > self.range.start);
        if index < head {
            return (self.range.start..middle.start, true);
        }
        if index - head < self.units.count(middle) {
            return (self.units.get(middle, index - head), false);
        }
        (middle.end..self.range.end, true)
    }
}

/// The units that ranges are cut at: equal divisions of each stripe. A plain file is one endless stripe.
#[derive(Clone, Copy, Debug)]
struct Units {
    stripe_bytes: u64,
    bytes: u64,
    per_stripe: u64,
}

impl Units {
    /// Divides a stripe into the fewest units of whole pages, of nearly equal size.
    fn new(block_bytes: u64, stripe_bytes: u64, page_bytes: u64) -> Self {
        if stripe_bytes == u64::MAX {
            return Self { stripe_bytes, bytes: block_bytes, per_stripe: u64::MAX.div_ceil(block_bytes) };
        }
        let pieces = stripe_bytes.div_ceil(block_bytes);
        let bytes = stripe_bytes.div_ceil(pieces).next_multiple_of(page_bytes);
        Self { stripe_bytes, bytes, per_stripe: stripe_bytes.div_ceil(bytes) }
    }

    /// Returns the unit of the file that contains a byte.
    fn holding(&self, offset: u64) -> u64 {
        offset / self.stripe_bytes * self.per_stripe + offset % self.stripe_bytes / self.bytes
    }

    /// Returns the number of units that a range touches.
    fn count(&self, range: &Range<u64>) -> u64 {
        if range.is_empty() { 0 } else { self.holding(range.end - 1) + 1 - self.holding(range.start) }
    }

    /// Returns the intersection of a range with its unit at this index.
    fn get(&self, range: &Range<u64>, index: u64) -> Range<u64> {
        let unit = self.holding(range.start) + index;
        let stripe_start = unit / self.per_stripe * self.stripe_bytes;
        let start = stripe_start + unit % self.per_stripe * self.bytes;
        let end = start.saturating_add(self.bytes).min(stripe_start.saturating_add(self.stripe_bytes));
        start.max(range.start)..end.min(range.end)
    }
}

/// Returns the block size for a range whose middle uses one piece of the caller's memory directly, or `None` if that is
/// not larger than a bounce buffer.
fn long_block_bytes(
    segments: &[Segment],
    middle: &Range<u64>,
    alignment: FileAlignment,
    sizes: BlockSizes,
) -> Option<u64> {
    let [segment] = segments else { return None };
    let len = middle.end.checked_sub(middle.start)?;
    let address = segment.address? as u64 + (middle.start - segment.offset);
    let bytes = share_bytes(len, sizes).min(sizes.block_bytes);
    (bytes > sizes.slot_bytes && alignment.memory.is_aligned(address)).then_some(bytes)
}

/// Returns the block size for a range whose middle goes through cuFile, or `None` if it does not use cuFile.
fn gds_block_bytes(middle: &Range<u64>, sizes: BlockSizes) -> Option<u64> {
    let len = middle.end.checked_sub(middle.start).filter(|len| *len >= GDS_BYTES_MIN)?;
    Some(share_bytes(len, sizes).max(sizes.slot_bytes).min(sizes.gds_bytes))
}

/// Returns the bytes per block that divide the range into `LONG_BLOCKS_MIN` blocks, in whole bounce buffers.
fn share_bytes(len: u64, sizes: BlockSizes) -> u64 {
    len / LONG_BLOCKS_MIN / sizes.slot_bytes * sizes.slot_bytes
}

fn invalid(direction: Direction, detail: &str) -> Error {
    Error::new(ErrorKind::InvalidInput, direction.name(), detail)
}
