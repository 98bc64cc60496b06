//! Ops with several iovecs.

use deepnvme_io::op::{IOV_MAX, OpKind};
use deepnvme_mem::{Region, RegionMut};

use super::{Harness, Make};
use crate::data::{TestFile, bytes_of, difference, random_bytes, region_at, region_holding};

/// Sizes that cover every phase of sectors and pages.
const ODD_SIZES: [usize; 9] = [1, 511, 512, 513, 4095, 4096, 4097, 3, 10_000];

/// A vectored read fills the iovecs in order.
pub fn iovecs_are_filled_in_order(make: Make<'_>) {
    let total: usize = ODD_SIZES.iter().sum();
    let content = random_bytes(5, total + 77);
    let file = TestFile::holding(&content);
    let mut harness = Harness::new(make, 2);
    let targets: Vec<RegionMut> = ODD_SIZES.iter().enumerate().map(|(skew, len)| region_at(skew, *len)).collect();
    let iovecs: Vec<Region> = targets.iter().map(RegionMut::region).collect();
    let op = harness.op(OpKind::Read, &file.file, 77, &iovecs);
    assert_eq!(harness.run(op).result, Ok(total));
    let found: Vec<u8> = iovecs.iter().flat_map(bytes_of).collect();
    assert_eq!(difference(&found, &content[77..]), None);
    // A short op fills the first iovecs and part of one.
    let op = harness.op(OpKind::Read, &file.file, 77 + 5000, &iovecs);
    assert_eq!(harness.run(op).result, Ok(total - 5000));
    let found: Vec<u8> = iovecs.iter().flat_map(bytes_of).collect();
    assert_eq!(difference(&found[..total - 5000], &content[5077..]), None);
}

/// A vectored write writes the iovecs in order.
pub fn iovecs_are_written_in_order(make: Make<'_>) {
    let file = TestFile::holding(&[]);
    let mut harness = Harness::new(make, 2);
    let contents: Vec<Vec<u8>> =
        ODD_SIZES.iter().enumerate().map(|(seed, len)| random_bytes(seed as u64, *len)).collect();
    let iovecs: Vec<Region> =
        contents.iter().enumerate().map(|(skew, bytes)| region_holding(skew, bytes).region()).collect();
    let op = harness.op(OpKind::Write, &file.file, 0, &iovecs);
    assert_eq!(harness.run(op).result, Ok(ODD_SIZES.iter().sum()));
    assert_eq!(difference(&file.bytes(), &contents.concat()), None);
}

/// An op with the maximum number of iovecs works.
pub fn the_most_iovecs_work(make: Make<'_>) {
    let content = random_bytes(6, IOV_MAX * 10);
    let file = TestFile::holding(&content);
    let mut harness = Harness::new(make, 4);
    let whole = region_at(0, IOV_MAX * 16).region();
    let iovecs: Vec<Region> = (0..IOV_MAX).map(|index| whole.slice(index * 16..index * 16 + 10)).collect();
    let op = harness.op(OpKind::Read, &file.file, 0, &iovecs);
    assert_eq!(harness.run(op).result, Ok(IOV_MAX * 10));
    let found: Vec<u8> = iovecs.iter().flat_map(bytes_of).collect();
    assert_eq!(difference(&found, &content), None);
    let op = harness.op(OpKind::Write, &file.file, 10, &iovecs);
    assert_eq!(harness.run(op).result, Ok(IOV_MAX * 10));
    assert_eq!(difference(&file.bytes()[10..], &content), None);
}
