//! From byte ranges to blocks: the properties of files and segments, and where their ranges are cut.

use std::ops::Range;

use deepnvme_mem::{Alignment, PAGE_BYTES};

use crate::error::{Error, ErrorKind, Result};
use crate::op::Direction;
use crate::stripe_layout::StripeLayout;

/// Minimum bytes of a block for cuFile. The latency of cuFile's calls would dominate smaller blocks, so they go through
/// a bounce buffer, if they fit one.
pub const GDS_BYTES_MIN: u64 = 64 << 10;

/// Minimum blocks per range while blocks are larger than a bounce buffer, so that all workers and the device's queue
/// have work.
const LARGE_BLOCKS_MIN: u64 = 16;

/// Block sizes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockSizes {
    /// Maximum bytes of a direct block that uses the caller's memory.
    pub block_bytes: u64,
    /// Maximum bytes of a block that may need a bounce buffer, or goes through the page cache. At most `block_bytes`.
    pub bounce_bytes: u64,
    /// Maximum bytes of a block for cuFile.
    pub gds_bytes: u64,
}

impl BlockSizes {
    /// Returns one size for all kinds of blocks.
    #[must_use]
    pub const fn same(bytes: u64) -> Self {
        Self { block_bytes: bytes, bounce_bytes: bytes, gds_bytes: bytes }
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
pub struct FileGeometry {
    /// `None` if the file goes through the page cache.
    pub direct: Option<FileAlignment>,
    /// The layout of the file over its parts.
    pub layout: StripeLayout,
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
    /// Length in bytes. A plan drops empty segments.
    pub len: u64,
    /// Address in host memory, or `None` if the memory is on a GPU or not contiguous.
    pub address: Option<usize>,
    /// Whether the memory is contiguous on a GPU.
    pub is_contiguous_gpu: bool,
}

impl Segment {
    pub(super) fn end(&self) -> u64 {
        self.offset + self.len
    }
}

/// A run of adjacent segments, as one range of one file. Reads allow small gaps.
#[derive(Clone, Debug)]
pub(super) struct Extent {
    pub(super) segments: Range<usize>,
    range: Range<u64>,
    grid: BlockGrid,
    pub(super) geometry: FileGeometry,
    /// The page-aligned middle, if the ragged edges around it are separate blocks: in a direct write, and in a long
    /// read whose middle needs no bounce buffer. It is inverted (start above end) if one page contains both edges.
    /// `None` if every cut is at a cell of the grid.
    middle: Option<Range<u64>>,
    /// Blocks of the request before this extent.
    pub(super) blocks_before: u64,
}

impl Extent {
    /// Joins the segments of a range of indices, and chooses where their blocks are cut. The extent is the first of its
    /// request until `blocks_before` is set.
    pub(super) fn new(
        direction: Direction,
        all: &[Segment],
        segments: Range<usize>,
        geometry: FileGeometry,
        sizes: BlockSizes,
    ) -> Result<Self> {
        let inside = &all[segments.clone()];
        let range = inside[0].offset..inside[inside.len() - 1].end();
        let stripe_bytes = geometry.layout.stripe_bytes;
        let Some(alignment) = geometry.direct else {
            let grid = BlockGrid::new(sizes.bounce_bytes, stripe_bytes, PAGE_BYTES);
            return Ok(Self { segments, range, grid, geometry, middle: None, blocks_before: 0 });
        };
        let page_bytes = alignment.offset.bytes().max(PAGE_BYTES);
        let setting = match (sizes.bounce_bytes.is_multiple_of(page_bytes), stripe_bytes) {
            (false, _) => Some("block_bytes"),
            (true, u64::MAX) => None,
            (true, stripe_bytes) => (!stripe_bytes.is_multiple_of(page_bytes)).then_some("stripe_bytes"),
        };
        if let Some(setting) = setting {
            let detail =
                format!("the file's direct I/O alignment is {page_bytes} bytes; set {setting} to a multiple of it");
            return Err(invalid(direction, &detail));
        }
        let inner = range.start.next_multiple_of(page_bytes)..range.end / page_bytes * page_bytes;
        let large_bytes = match inside {
            [segment] if segment.is_contiguous_gpu && geometry.has_gds => gds_block_bytes(&inner, sizes),
            _ => large_block_bytes(inside, &inner, alignment, sizes),
        };
        let block_bytes = large_bytes.map_or(sizes.bounce_bytes, |bytes| bytes / page_bytes * page_bytes);
        let grid = BlockGrid::new(block_bytes, stripe_bytes, page_bytes);
        let has_edges = inner != range && (direction == Direction::Write || large_bytes.is_some());
        Ok(Self { segments, range, grid, geometry, middle: has_edges.then_some(inner), blocks_before: 0 })
    }

    /// Returns its range of the file.
    pub(super) fn range(&self) -> &Range<u64> {
        &self.range
    }

    /// Returns the number of its blocks.
    pub(super) fn block_count(&self) -> u64 {
        match &self.middle {
            None => self.grid.count(&self.range),
            Some(middle) if middle.start > middle.end => 1,
            Some(middle) => {
                let head = u64::from(middle.start > self.range.start);
                let tail = u64::from(self.range.end > middle.end);
                head + self.grid.count(middle) + tail
            }
        }
    }

    /// Returns the range of the extent's block with this index, and whether it is a ragged edge.
    pub(super) fn block_range(&self, index: u64) -> (Range<u64>, bool) {
        let Some(middle) = &self.middle else {
            return (self.grid.get(&self.range, index), false);
        };
        if middle.start > middle.end {
            return (self.range.clone(), true);
        }
        let head = u64::from(middle.start > self.range.start);
        if index < head {
            return (self.range.start..middle.start, true);
        }
        if index - head < self.grid.count(middle) {
            return (self.grid.get(middle, index - head), false);
        }
        (middle.end..self.range.end, true)
    }
}

/// The offsets at which ranges are cut: equal cells of each stripe. A plain file is one endless stripe.
#[derive(Clone, Copy, Debug)]
struct BlockGrid {
    stripe_bytes: u64,
    cell_bytes: u64,
    cells_per_stripe: u64,
}

impl BlockGrid {
    /// Divides a stripe into the fewest cells of whole pages, of nearly equal size.
    fn new(block_bytes: u64, stripe_bytes: u64, page_bytes: u64) -> Self {
        if stripe_bytes == u64::MAX {
            let cells_per_stripe = u64::MAX.div_ceil(block_bytes);
            return Self { stripe_bytes, cell_bytes: block_bytes, cells_per_stripe };
        }
        let cells = stripe_bytes.div_ceil(block_bytes);
        let cell_bytes = stripe_bytes.div_ceil(cells).next_multiple_of(page_bytes);
        Self { stripe_bytes, cell_bytes, cells_per_stripe: stripe_bytes.div_ceil(cell_bytes) }
    }

    /// Returns the index of the cell that contains a byte.
    fn cell_at(&self, offset: u64) -> u64 {
        offset / self.stripe_bytes * self.cells_per_stripe + offset % self.stripe_bytes / self.cell_bytes
    }

    /// Returns the number of cells that a range touches.
    fn count(&self, range: &Range<u64>) -> u64 {
        if range.is_empty() { 0 } else { self.cell_at(range.end - 1) + 1 - self.cell_at(range.start) }
    }

    /// Returns the intersection of a range with its cell at this index.
    fn get(&self, range: &Range<u64>, index: u64) -> Range<u64> {
        let cell = self.cell_at(range.start) + index;
        let stripe_start = cell / self.cells_per_stripe * self.stripe_bytes;
        let start = stripe_start + cell % self.cells_per_stripe * self.cell_bytes;
        let end = start.saturating_add(self.cell_bytes).min(stripe_start.saturating_add(self.stripe_bytes));
        start.max(range.start)..end.min(range.end)
    }
}

/// Returns the block size for a range whose middle uses one piece of the caller's memory directly. `None` if the memory
/// does not allow that, or the size is not larger than a bounce buffer.
fn large_block_bytes(
    segments: &[Segment],
    middle: &Range<u64>,
    alignment: FileAlignment,
    sizes: BlockSizes,
) -> Option<u64> {
    let [segment] = segments else { return None };
    let len = middle.end.checked_sub(middle.start)?;
    let address = segment.address? as u64 + (middle.start - segment.offset);
    let bytes = bytes_per_block(len, sizes).min(sizes.block_bytes);
    (bytes > sizes.bounce_bytes && alignment.memory.is_aligned(address)).then_some(bytes)
}

/// Returns the block size for a range whose middle goes through cuFile, or `None` if it does not use cuFile.
fn gds_block_bytes(middle: &Range<u64>, sizes: BlockSizes) -> Option<u64> {
    let len = middle.end.checked_sub(middle.start).filter(|len| *len >= GDS_BYTES_MIN)?;
    Some(bytes_per_block(len, sizes).max(sizes.bounce_bytes).min(sizes.gds_bytes))
}

/// Returns the bytes per block that divide the range into `LARGE_BLOCKS_MIN` blocks or more, in whole bounce buffers. 0
/// for a short range.
fn bytes_per_block(len: u64, sizes: BlockSizes) -> u64 {
    len / LARGE_BLOCKS_MIN / sizes.bounce_bytes * sizes.bounce_bytes
}

/// Returns the error of an invalid request.
pub(super) fn invalid(direction: Direction, detail: &str) -> Error {
    Error::new(ErrorKind::InvalidInput, direction.name(), detail)
}
