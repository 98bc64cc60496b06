//! Properties of splitting, over random requests: every wanted byte in exactly one block, every direct op aligned.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail like tests")]

use deepnvme_io::StripeLayout;
use deepnvme_io::op::Direction;
use deepnvme_io::split::{
    Block, BlockPlan, BlockSizes, FileAlignment, FileGeometry, GDS_BYTES_MIN, IoMode, Route, Segment,
};
use deepnvme_mem::Alignment;
use proptest::prelude::*;

const PAGE: u64 = 4096;

fn geometries() -> impl Strategy<Value = FileGeometry> {
    let alignment = (0u32..4, 9u32..13).prop_map(|(memory, offset)| FileAlignment {
        memory: Alignment::new(1 << (memory * 3)).unwrap(),
        offset: Alignment::new(1 << offset).unwrap(),
    });
    let layout = prop_oneof![
        Just(StripeLayout::SINGLE),
        (2u64..5, 1u64..9).prop_map(|(parts, pages)| StripeLayout { parts, stripe_bytes: pages * PAGE }),
    ];
    (proptest::option::of(alignment), layout).prop_map(|(direct, layout)| FileGeometry {
        direct,
        layout,
        has_gds: false,
    })
}

/// Generates ranges in file order with gaps between them. Some are adjacent.
fn segments() -> impl Strategy<Value = Vec<Segment>> {
    let lengths = prop_oneof![Just(512u64), Just(4096), 1u64..10_000, 1u64..200];
    let gaps = prop_oneof![4 => Just(0u64), 1 => 1u64..20_000, 1 => Just(4096)];
    let address = proptest::option::weighted(0.9, prop_oneof![Just(1usize << 20), 0usize..10_000]);
    proptest::collection::vec((gaps, lengths, address), 1..12).prop_map(|list| {
        let mut offset = 0;
        let place = |(index, (gap, len, address)): (usize, (u64, u64, Option<usize>))| {
            let start = offset + gap;
            offset = start + len;
            Segment { file: 0, item: index as u32, offset: start, len, address, is_contiguous_gpu: false }
        };
        list.into_iter().enumerate().map(place).collect()
    })
}

fn blocks(plan: &BlockPlan) -> Vec<Block> {
    (0..plan.block_count()).map(|index| plan.block(index)).collect()
}

fn check(
    direction: Direction,
    geometry: FileGeometry,
    segments: &[Segment],
    sizes: BlockSizes,
) -> Result<(), TestCaseError> {
    let plan = BlockPlan::new(direction, &[geometry], segments.to_vec(), sizes).unwrap();
    let mut moved: Vec<std::ops::Range<u64>> = Vec::new();
    for block in blocks(&plan) {
        prop_assert!(!block.range.is_empty());
        prop_assert!(block.io.start <= block.range.start && block.range.end <= block.io.end);
        let largest = match block.route {
            Route::Caller => sizes.block_bytes,
            Route::Bounce => sizes.bounce_bytes,
            Route::Gds => sizes.gds_bytes,
        };
        prop_assert!(block.io.end - block.io.start <= largest, "an op fits a slot, or is a block");
        let parts = (geometry.layout.locate(block.io.start).0, geometry.layout.locate(block.io.end - 1).0);
        prop_assert_eq!(parts.0, parts.1, "an op stays in one part");
        if direction == Direction::Write {
            prop_assert_eq!(&block.io, &block.range, "a write never widens");
        }
        check_alignment(geometry, segments, &block)?;
        for segment in &plan.segments()[block.segments.clone()] {
            let start = segment.offset.max(block.range.start);
            let end = (segment.offset + segment.len).min(block.range.end);
            prop_assert!(start < end, "every segment of a block overlaps it");
            moved.push(start..end);
        }
    }
    moved.sort_by_key(|range| range.start);
    for pair in moved.windows(2) {
        prop_assert!(pair[0].end <= pair[1].start, "no byte moves twice");
    }
    prop_assert_eq!(moved.iter().map(|range| range.end - range.start).sum::<u64>(), plan.bytes_total());
    Ok(())
}

fn check_alignment(geometry: FileGeometry, segments: &[Segment], block: &Block) -> Result<(), TestCaseError> {
    let IoMode::Direct = block.mode else {
        return Ok(());
    };
    let alignment = geometry.direct.expect("direct blocks only where there is direct I/O");
    prop_assert!(alignment.offset.is_aligned(block.io.start) && alignment.offset.is_aligned(block.io.end));
    if block.route == Route::Caller {
        for segment in segments.iter().filter(|s| s.offset < block.range.end && s.offset + s.len > block.range.start) {
            let start = segment.offset.max(block.range.start);
            let end = (segment.offset + segment.len).min(block.range.end);
            let address = segment.address.expect("contiguous") as u64 + (start - segment.offset);
            prop_assert!(alignment.memory.is_aligned(address));
            prop_assert!(alignment.offset.is_aligned(end - start));
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn reads_obey_the_laws(geometry in geometries(), segments in segments(), pages in 1u64..9) {
        check(Direction::Read, geometry, &segments, BlockSizes::same(pages * PAGE))?;
    }

    #[test]
    fn writes_obey_the_laws(geometry in geometries(), segments in segments(), pages in 1u64..9) {
        check(Direction::Write, geometry, &segments, BlockSizes::same(pages * PAGE))?;
    }

    #[test]
    fn long_requests_obey_the_laws(
        geometry in geometries(), is_read: bool, offset in 0u64..20_000, len in 1u64..3_000_000,
        skew in prop_oneof![Just(0usize), 0usize..4096], slot_pages in 1u64..9, block_pages in 0u64..64,
    ) {
        let address = (offset % PAGE) as usize + skew + (1 << 20);
        let segment = Segment { file: 0, item: 0, offset, len, address: Some(address), is_contiguous_gpu: false };
        let bounce_bytes = slot_pages * PAGE;
        let sizes = BlockSizes { block_bytes: bounce_bytes + block_pages * PAGE, bounce_bytes, gds_bytes: bounce_bytes };
        let direction = if is_read { Direction::Read } else { Direction::Write };
        check(direction, geometry, &[segment], sizes)?;
    }

    /// Blocks for cuFile are whole pages of one tensor. All others fit a bounce buffer.
    #[test]
    fn blocks_for_cufile_obey_the_laws(
        geometry in geometries(), is_read: bool, offset in 0u64..20_000, len in 1u64..9_000_000,
        slot_pages in prop_oneof![1u64..9, 16u64..40], gds_pages in 0u64..200, later in segments(),
    ) {
        let bounce_bytes = slot_pages * PAGE;
        let gds_bytes = bounce_bytes + gds_pages * PAGE;
        let sizes = BlockSizes { block_bytes: bounce_bytes, bounce_bytes, gds_bytes };
        let geometry = FileGeometry { has_gds: true, ..geometry };
        let direction = if is_read { Direction::Read } else { Direction::Write };
        let end = offset + len;
        let on_gpu = |segment| Segment { is_contiguous_gpu: true, address: None, ..segment };
        let mut segments = vec![on_gpu(Segment { file: 0, item: 0, offset, len, address: None, is_contiguous_gpu: true })];
        segments.extend(later.into_iter().map(|s| on_gpu(Segment { offset: s.offset + end, item: s.item + 1, ..s })));
        check(direction, geometry, &segments, sizes)?;
        check(direction, geometry, &segments[..1], sizes)?;
        let plan = BlockPlan::new(direction, &[geometry], segments[..1].to_vec(), sizes).unwrap();
        let blocks = blocks(&plan);
        for block in blocks.iter().filter(|block| block.route == Route::Gds) {
            prop_assert_eq!((block.range.start % PAGE, block.range.end % PAGE), (0, 0));
            prop_assert!(geometry.direct.is_some());
        }
        let by_gds: u64 = blocks.iter().filter(|b| b.route == Route::Gds).map(|b| b.range.end - b.range.start).sum();
        if geometry.direct.is_some() && geometry.layout == StripeLayout::SINGLE && bounce_bytes >= GDS_BYTES_MIN {
            prop_assert!(by_gds + 2 * (GDS_BYTES_MIN + PAGE) > len, "all but the ends");
        }
    }

    /// Pages with an edge are never written directly, which makes concurrent writes to adjacent ranges safe.
    #[test]
    fn direct_writes_are_whole_pages(geometry in geometries(), segments in segments(), pages in 1u64..9) {
        let plan = BlockPlan::new(Direction::Write, &[geometry], segments, BlockSizes::same(pages * PAGE)).unwrap();
        for block in blocks(&plan) {
            if block.mode == IoMode::Direct {
                prop_assert_eq!((block.range.start % PAGE, block.range.end % PAGE), (0, 0));
            }
        }
    }

    #[test]
    fn the_order_of_the_callers_list_does_not_matter(geometry in geometries(), segments in segments(), seed in 0usize..7) {
        let mut shuffled = segments.clone();
        let middle = seed % shuffled.len();
        shuffled.rotate_left(middle);
        let one = BlockPlan::new(Direction::Write, &[geometry], segments, BlockSizes::same(PAGE * 4)).unwrap();
        let other = BlockPlan::new(Direction::Write, &[geometry], shuffled, BlockSizes::same(PAGE * 4)).unwrap();
        prop_assert_eq!(blocks(&one), blocks(&other));
    }
}

/// Returns one file with direct I/O and sectors of this size.
fn geometry_with_sectors(bytes: u64) -> FileGeometry {
    let alignment = Alignment::new(bytes).unwrap();
    FileGeometry {
        direct: Some(FileAlignment { memory: alignment, offset: alignment }),
        layout: StripeLayout::SINGLE,
        has_gds: false,
    }
}

/// Large ranges have few ops, but enough for every worker and the device.
#[test]
fn a_long_range_that_needs_no_slot_has_large_blocks() {
    let geometry = geometry_with_sectors(512);
    let sizes = BlockSizes { block_bytes: 2 << 20, bounce_bytes: 512 << 10, gds_bytes: 4 << 20 };
    let count = |address, offset, len| {
        let segment = Segment { file: 0, item: 0, offset, len, address: Some(address), is_contiguous_gpu: false };
        let plan = BlockPlan::new(Direction::Read, &[geometry], vec![segment], sizes).unwrap();
        let bounced = blocks(&plan).iter().filter(|block| block.route == Route::Bounce).count();
        (plan.block_count(), bounced)
    };
    assert_eq!(count(4096, 0, 1 << 30), (512, 0));
    assert_eq!(count(4096, 0, 16 << 20), (16, 0), "1 MiB each");
    assert_eq!(count(4096, 0, 8 << 20), (16, 0), "as large as a slot");
    assert_eq!(count(4096, 0, (1 << 30) + 1), (513, 1), "a ragged end is a block of its own");
    assert_eq!(count(4096 + 100, 100, 1 << 30), (514, 2), "so is a ragged beginning");
    assert_eq!(count(4096 + 64, 0, 1 << 30), (2048, 2048), "all of it goes through bounce buffers");
}

#[test]
fn stripes_of_any_number_of_pages_are_cut_into_few_blocks() {
    // Primes, up to the one below 4 GiB.
    for (stripe_pages, parts) in [(257_u64, 3_u64), (16_381, 16), (1_048_573, 256)] {
        let layout = StripeLayout { parts, stripe_bytes: stripe_pages * PAGE };
        let aligned = FileAlignment { memory: Alignment::new(512).unwrap(), offset: Alignment::new(4096).unwrap() };
        let len = layout.stripe_bytes * parts;
        for (address, block_bytes) in [(Some(0), 4 << 20), (Some(1), 512 << 10)] {
            for direct in [Some(aligned), None] {
                let geometry = FileGeometry { direct, layout, has_gds: false };
                let sizes = BlockSizes { block_bytes: 4 << 20, bounce_bytes: 512 << 10, gds_bytes: 4 << 20 };
                let segment = Segment { file: 0, item: 0, offset: 0, len, address, is_contiguous_gpu: false };
                let began = std::time::Instant::now();
                let plan = BlockPlan::new(Direction::Write, &[geometry], vec![segment], sizes).unwrap();
                let block_bytes: u64 = if direct.is_some() { block_bytes } else { 512 << 10 };
                let share = (len / 16).min(block_bytes).max(512 << 10);
                let bound = parts * layout.stripe_bytes.div_ceil(share) * 2 + 2;
                assert!(plan.block_count() <= bound, "{} blocks of at most {bound}", plan.block_count());
                for index in [0, 1, plan.block_count() / 2, plan.block_count() - 1] {
                    let block = plan.block(index);
                    assert_eq!(layout.locate(block.range.start).0, layout.locate(block.range.end - 1).0);
                }
                assert!(began.elapsed() < std::time::Duration::from_millis(100), "{:?}", began.elapsed());
            }
        }
    }
}

#[test]
fn overlapping_writes_are_refused_and_overlapping_reads_are_not() {
    let geometry = FileGeometry { direct: None, layout: StripeLayout::SINGLE, has_gds: false };
    let segment = |offset| Segment { file: 0, item: 0, offset, len: 100, address: Some(0), is_contiguous_gpu: false };
    let both = vec![segment(0), segment(99)];
    assert!(BlockPlan::new(Direction::Write, &[geometry], both.clone(), BlockSizes::same(PAGE)).is_err());
    assert_eq!(BlockPlan::new(Direction::Read, &[geometry], both, BlockSizes::same(PAGE)).unwrap().bytes_total(), 200);
}

#[test]
fn a_range_beyond_the_largest_offset_is_refused() {
    let geometry = FileGeometry { direct: None, layout: StripeLayout::SINGLE, has_gds: false };
    for (offset, len) in [(u64::MAX, 1), (i64::MAX as u64, 1), (1, u64::MAX)] {
        let segment = Segment { file: 0, item: 0, offset, len, address: Some(0), is_contiguous_gpu: false };
        assert!(BlockPlan::new(Direction::Read, &[geometry], vec![segment], BlockSizes::same(PAGE)).is_err());
    }
}

#[test]
fn ten_thousand_adjacent_tensors_become_large_transfers() {
    let geometry = geometry_with_sectors(512);
    let mut offset = 0;
    let segments: Vec<_> = (0..10_000u32)
        .map(|item| {
            let len = 4096 + u64::from(item) * 7 % 60_000;
            let segment = Segment {
                file: 0,
                item,
                offset,
                len,
                address: Some(64 + item as usize * 65_536),
                is_contiguous_gpu: false,
            };
            offset += len;
            segment
        })
        .collect();
    let plan = BlockPlan::new(Direction::Read, &[geometry], segments, BlockSizes::same(1 << 20)).unwrap();
    assert_eq!(plan.block_count(), offset.div_ceil(1 << 20));
}
