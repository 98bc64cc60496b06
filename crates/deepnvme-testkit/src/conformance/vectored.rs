//! Ops with several pieces of memory.

use deepnvme_io::op::{OpKind, PIECES_MAX};
use deepnvme_mem::{Region, RegionMut};

use super::{Harness, Make};
use crate::data::{TestFile, bytes_of, difference, random_bytes, region_at, region_holding};

/// Sizes that cover every phase of sectors and pages.
const ODD_SIZES: [usize; 9] = [1, 511, 512, 513, 4095, 4096, 4097, 3, 10_000];

/// A vectored read fills the pieces in order.
pub fn pieces_are_filled_in_order(make: Make<'_>) {
    let total: usize = ODD_SIZES.iter().sum();
    let content = random_bytes(5, total + 77);
    let file = TestFile::holding(&content);
    let mut harness = Harness::new(make, 2);
    let targets: Vec<RegionMut> = ODD_SIZES.iter().enumerate().map(|(skew, len)| region_at(skew, *len)).collect();
    let pieces: Vec<Region> = targets.iter().map(RegionMut::region).collect();
    let op = harness.op(OpKind::Read, &file.file, 77, &pieces);
    assert_eq!(harness.run(op).result, Ok(total));
    let found: Vec<u8> = pieces.iter().flat_map(bytes_of).collect();
    assert_eq!(difference(&found, &content[77..]), None);
    // A short op fills the first pieces and part of one.
    let op = harness.op(OpKind::Read, &file.file, 77 + 5000, &pieces);
    assert_eq!(harness.run(op).result, Ok(total - 5000));
    let found: Vec<u8> = pieces.iter().flat_map(bytes_of).collect();
    assert_eq!(difference(&found[..total - 5000], &content[5077..]), None);
}

/// A vectored write writes the pieces in order.
pub fn pieces_are_written_in_order(make: Make<'_>) {
    let file = TestFile::holding(&[]);
    let mut harness = Harness::new(make, 2);
    let contents: Vec<Vec<u8>> =
        ODD_SIZES.iter().enumerate().map(|(seed, len)| random_bytes(seed as u64, *len)).collect();
    let pieces: Vec<Region> =
        contents.iter().enumerate().map(|(skew, bytes)| region_holding(skew, bytes).region()).collect();
    let op = harness.op(OpKind::Write, &file.file, 0, &pieces);
    assert_eq!(harness.run(op).result, Ok(ODD_SIZES.iter().sum()));
    assert_eq!(difference(&file.bytes(), &contents.concat()), None);
}

/// An op with the maximum number of pieces works.
pub fn the_most_pieces_work(make: Make<'_>) {
    let content = random_bytes(6, PIECES_MAX * 10);
    let file = TestFile::holding(&content);
    let mut harness = Harness::new(make, 4);
    let whole = region_at(0, PIECES_MAX * 16).region();
    let pieces: Vec<Region> = (0..PIECES_MAX).map(|index| whole.slice(index * 16..index * 16 + 10)).collect();
    let op = harness.op(OpKind::Read, &file.file, 0, &pieces);
    assert_eq!(harness.run(op).result, Ok(PIECES_MAX * 10));
    let found: Vec<u8> = pieces.iter().flat_map(bytes_of).collect();
    assert_eq!(difference(&found, &content), None);
    let op = harness.op(OpKind::Write, &file.file, 10, &pieces);
    assert_eq!(harness.run(op).result, Ok(PIECES_MAX * 10));
    assert_eq!(difference(&file.bytes()[10..], &content), None);
}
