//! The right bytes at the right offset, up to the end of the file.

use deepnvme_io::op::{Errno, OpKind};

use super::{Harness, Make};
use crate::data::{TestFile, bytes_of, difference, open_direct, random_bytes, region_at, region_holding};

/// A read across the end of the file returns the bytes before it and leaves the rest of the memory unchanged.
///
/// # Panics
/// If the backend breaks the contract, like every check.
pub fn reads_stop_at_the_end_of_the_file(make: Make<'_>) {
    for len in [1, 100, 511, 512, 513, 4096, 5000] {
        let content = random_bytes(len as u64, len);
        let file = TestFile::holding(&content);
        let mut harness = Harness::new(make, 2);
        for offset in [0, len / 2, len - 1] {
            let target = region_holding(0, &[0xee; 9000]);
            assert_eq!(harness.read(&file.file, offset as u64, &target.region()), Ok(len - offset));
            let bytes = bytes_of(&target.region());
            assert_eq!(bytes[..len - offset], content[offset..]);
            assert!(bytes[len - offset..].iter().all(|byte| *byte == 0xee), "bytes past the end were touched");
        }
    }
}

/// A read at or after the end moves nothing and is not an error.
pub fn reads_past_the_end_are_empty(make: Make<'_>) {
    let file = TestFile::holding(&random_bytes(1, 4096));
    let empty = TestFile::holding(&[]);
    let mut harness = Harness::new(make, 2);
    for offset in [4096, 4097, 8192, 1 << 40] {
        assert_eq!(harness.read(&file.file, offset, &region_at(0, 4096).region()), Ok(0), "at {offset}");
    }
    assert_eq!(harness.read(&empty.file, 0, &region_at(0, 1).region()), Ok(0));
}

/// A read changes the op's memory and no byte around it.
pub fn reads_leave_the_memory_around_alone(make: Make<'_>) {
    let content = random_bytes(2, 20_000);
    let file = TestFile::holding(&content);
    let mut harness = Harness::new(make, 2);
    for (skew, len) in [(1, 1), (7, 511), (64, 4096), (511, 513), (512, 10_000), (4095, 3)] {
        let whole = region_holding(0, &[0xee; 16_384]);
        let target = whole.region().slice(skew..skew + len);
        assert_eq!(harness.read(&file.file, 13, &target), Ok(len));
        let mut expected = vec![0xee; 16_384];
        expected[skew..skew + len].copy_from_slice(&content[13..13 + len]);
        assert_eq!(difference(&bytes_of(&whole.region()), &expected), None, "skew {skew}, {len} bytes");
    }
}

/// A write changes its range of the file and no byte around it.
pub fn writes_land_at_their_offset_and_nowhere_else(make: Make<'_>) {
    let mut expected = random_bytes(3, 50_000);
    let file = TestFile::holding(&expected);
    let mut harness = Harness::new(make, 16);
    let places = [(0, 1), (511, 2), (4095, 4097), (12_288, 4096), (20_001, 513), (49_999, 1)];
    for (seed, (offset, len)) in places.into_iter().enumerate() {
        let bytes = random_bytes(100 + seed as u64, len);
        let op = harness.op(OpKind::Write, &file.file, offset as u64, &[region_holding(seed, &bytes).region()]);
        harness.submit(op);
        expected[offset..offset + len].copy_from_slice(&bytes);
    }
    for completion in harness.reap(places.len()) {
        assert_eq!(completion.result, Ok(completion.op.bytes()));
    }
    assert_eq!(difference(&file.bytes(), &expected), None);
}

/// A write past the end extends the file, with zeros in between.
pub fn writes_extend_the_file(make: Make<'_>) {
    let file = TestFile::holding(b"start");
    let mut harness = Harness::new(make, 2);
    let bytes = random_bytes(4, 3000);
    assert_eq!(harness.write(&file.file, 5, &region_holding(9, &bytes).region()), Ok(3000));
    assert_eq!(harness.write(&file.file, 10_000, &region_holding(0, b"end").region()), Ok(3));
    let mut expected = [b"start".as_slice(), &bytes].concat();
    expected.resize(10_000, 0);
    expected.extend(b"end");
    assert_eq!(difference(&file.bytes(), &expected), None);
}

/// Offsets are 64-bit numbers.
pub fn offsets_beyond_four_gibibytes_work(make: Make<'_>) {
    let offset = (5 << 30) + 12_345;
    let file = TestFile::holding(&[]);
    let mut harness = Harness::new(make, 2);
    let bytes = random_bytes(7, 5000);
    match harness.write(&file.file, offset, &region_holding(0, &bytes).region()) {
        // A file system may not support files of that size.
        Err(Errno::FBIG) => return,
        result => assert_eq!(result, Ok(5000)),
    }
    let target = region_at(3, 6000);
    assert_eq!(harness.read(&file.file, offset, &target.region()), Ok(5000));
    assert_eq!(bytes_of(&target.region())[..5000], bytes);
    assert_eq!(harness.read(&file.file, offset & 0xffff_ffff, &target.region()), Ok(6000));
    assert_eq!(bytes_of(&target.region()), [0; 6000], "the write landed in the low 32 bits of its offset");
}

/// A single op of many mebibytes moves all of them.
pub fn large_ops_work(make: Make<'_>) {
    const BYTES: usize = (8 << 20) + 1;
    let content = random_bytes(8, BYTES);
    let file = TestFile::holding(&[]);
    let mut harness = Harness::new(make, 2);
    assert_eq!(harness.write(&file.file, 0, &region_holding(1, &content).region()), Ok(BYTES));
    let target = region_at(64, BYTES);
    assert_eq!(harness.read(&file.file, 0, &target.region()), Ok(BYTES));
    assert_eq!(difference(&bytes_of(&target.region()), &content), None);
}

/// Aligned direct transfers work. Misaligned ones return the kernel's error, since a backend does not align. Without
/// direct I/O there is nothing to check.
pub fn direct_files_work_and_are_not_realigned(make: Make<'_>) {
    let content = random_bytes(9, 64 << 10);
    let file = TestFile::holding(&content);
    let Some(direct) = open_direct(&file.path) else {
        return;
    };
    let mut harness = Harness::new(make, 4);
    let target = region_at(0, 16 << 10);
    assert_eq!(harness.read(&direct, 4096, &target.region()), Ok(16 << 10));
    assert_eq!(difference(&bytes_of(&target.region()), &content[4096..4096 + (16 << 10)]), None);
    let bytes = random_bytes(10, 8192);
    assert_eq!(harness.write(&direct, 32 << 10, &region_holding(0, &bytes).region()), Ok(8192));
    assert_eq!(difference(&file.bytes()[32 << 10..40 << 10], &bytes), None);
    match harness.read(&direct, 1, &region_at(0, 4096).region()) {
        Err(errno) => assert_eq!(errno, Errno::INVAL),
        Ok(moved) => assert_eq!(moved, 4096, "a file system that takes any offset moves all bytes"),
    }
}
