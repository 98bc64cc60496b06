//! The division of a file among several writers. Pure.
//!
//! All shards but the last have one size, a multiple of the block, so that no writer reads before it writes. The part
//! files of writers without a shared file system form a stripe set of one row: read through its manifest, or joined
//! with `cat`, they are the file.

use std::ops::Range;

use super::spans::ALIGNMENT_BYTES;

/// Minimum size of a shard unless it is the only one. Below it, the cost of a file dominates.
pub const SHARD_BYTES_MIN: u64 = 16 << 20;
/// Minimum blocks of a shard, per writer. Bounds how much smaller the last shard is.
const BLOCKS_PER_WRITER: u64 = 20;

/// Divides a file of `bytes` bytes among at most `writers` writers, in file order. Uses fewer writers if shards would
/// be smaller than [`SHARD_BYTES_MIN`], or too small for an even split within 5%.
#[must_use]
pub fn shard_ranges(bytes: u64, writers: usize) -> Vec<Range<u64>> {
    let blocks = bytes.div_ceil(ALIGNMENT_BYTES);
    let fits = |writers: &u64| {
        let shard = blocks / writers;
        shard * ALIGNMENT_BYTES / 20 * 19 >= SHARD_BYTES_MIN && shard >= writers * BLOCKS_PER_WRITER
    };
    // More writers mean smaller shards and stricter limits, so a binary search finds the most that fit.
    let (mut writers, mut beyond) = (1, writers as u64 + 1);
    while beyond - writers > 1 {
        let middle = writers.midpoint(beyond);
        *(if fits(&middle) { &mut writers } else { &mut beyond }) = middle;
    }
    let shard_bytes = blocks.div_ceil(writers) * ALIGNMENT_BYTES;
    (0..writers).map(|writer| writer * shard_bytes..((writer + 1) * shard_bytes).min(bytes)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn shards_cover_the_file_evenly(bytes in 0u64..1 << 44, small in any::<bool>(), writers in 1usize..5000) {
            let bytes = if small { bytes >> 14 } else { bytes };
            let shards = shard_ranges(bytes, writers);
            prop_assert!((1..=writers).contains(&shards.len()));
            prop_assert_eq!((shards[0].start, shards[shards.len() - 1].end), (0, bytes));
            prop_assert!(shards.windows(2).all(|pair| pair[0].end == pair[1].start));
            if shards.len() > 1 {
                let mean = bytes as f64 / shards.len() as f64;
                for shard in &shards {
                    let shard_bytes = shard.end - shard.start;
                    prop_assert!((shard_bytes as f64 / mean - 1.0).abs() < 0.05, "{shard_bytes} of {mean}");
                    prop_assert!(shard_bytes >= SHARD_BYTES_MIN);
                    prop_assert_eq!(shard.start % ALIGNMENT_BYTES, 0);
                }
            }
        }
    }

    #[test]
    fn as_many_write_as_have_something_to_do() {
        assert_eq!((shard_ranges(0, 8).len(), shard_ranges(0, 8)[0].end), (1, 0));
        assert_eq!((shard_ranges(5, 8).len(), shard_ranges(5, 8)[0].end), (1, 5));
        assert_eq!(
            shard_ranges(100 << 20, 4),
            [0..25 << 20, 25 << 20..50 << 20, 50 << 20..75 << 20, 75 << 20..100 << 20]
        );
        assert_eq!(shard_ranges(100 << 20, 64).len(), 5);
        assert_eq!(shard_ranges(200 << 30, 1024).len(), 1024);
    }
}
