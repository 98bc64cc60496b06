//! Reads of bytes that are in the page cache.
#![allow(clippy::expect_used, reason = "helpers of tests fail like tests")]

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use common::{all_real, direct_works, engine, skipped, small_config};
use deepnvme_io::{
    Access, DirectMode, Durability, Engine, OpenOptions, ReadItem, StatsSnapshot, StripeLayout, SubmitMode, TensorFile,
    WriteOptions,
};
use deepnvme_testkit::data::{TestFile, bytes_of, difference, random_bytes, region_at, region_holding};
use deepnvme_testkit::rng::Rng;
use rustix::fs::{Advice, fadvise};

const ROUNDS: usize = 80;
const FILE_BYTES: usize = 1 << 20;
const HALF: u64 = FILE_BYTES as u64 / 2;
/// Blocks below this are not asked about.
const UNASKED_BYTES_MAX: u64 = 16 << 10;

/// A file that the page cache has.
struct CachedFile {
    test_file: TestFile,
    data: Vec<u8>,
}

impl CachedFile {
    /// Returns `None`, and reports the skip, where there is no direct I/O or no way to ask the page cache.
    fn new(seed: u64) -> Option<Self> {
        if !direct_works() {
            return None;
        }
        let data = random_bytes(seed, FILE_BYTES);
        let cached = Self { test_file: TestFile::holding(&data), data };
        cached.file().sync_all().expect("a sync");
        cached.cache(FILE_BYTES as u64);
        if !cached.open(DirectMode::Preferred).is_mostly_cached(&(0..FILE_BYTES as u64)) {
            skipped("the kernel does not report its page cache (before Linux 6.5)");
            return None;
        }
        Some(cached)
    }

    fn file(&self) -> File {
        File::options().read(true).write(true).open(&self.test_file.path).expect("the test file")
    }

    fn open(&self, direct: DirectMode) -> Arc<TensorFile> {
        let options = OpenOptions { access: Access::Read, create: false, direct };
        TensorFile::open(&self.test_file.path, options).expect("the test file")
    }

    /// Reads the first `bytes`, so that the page cache has them.
    fn cache(&self, bytes: u64) {
        let file = self.file();
        // Without read-ahead.
        fadvise(&file, 0, None, Advice::Random).expect("advice");
        file.read_exact_at(&mut vec![0; bytes as usize], 0).expect("a buffered read");
    }

    /// Drops the file from the page cache, except for the first `bytes`. Returns whether it did.
    fn forget_all_but(&self, bytes: u64) -> bool {
        fadvise(self.file(), 0, None, Advice::DontNeed).expect("advice");
        self.cache(bytes);
        let forgotten = !self.open(DirectMode::Preferred).is_mostly_cached(&(bytes..FILE_BYTES as u64));
        if !forgotten {
            skipped("the file system keeps the file in memory");
        }
        forgotten
    }

    /// Reads a range into memory that starts `skew` bytes after a page boundary, and compares it.
    fn check_read(&self, engine: &Engine, file: &Arc<TensorFile>, offset: usize, bytes: usize, skew: usize) {
        let (region, result) = engine.read(file, offset as u64, region_at(skew, bytes)).expect("a request").wait();
        result.expect("a read");
        let region = region.expect("the memory");
        assert_eq!(difference(&bytes_of(&region.region()), &self.data[offset..offset + bytes]), None);
    }
}

/// Runs with an engine over every real backend. Returns the counters.
fn with_every_backend(run: impl Fn(&Engine)) -> Vec<StatsSnapshot> {
    let run_one = |make| {
        let engine = engine(small_config(2, SubmitMode::Batch), make);
        run(&engine);
        engine.stats()
    };
    all_real().into_iter().map(|(_, make)| run_one(make)).collect()
}

#[test]
fn cached_bytes_come_from_the_cache_at_any_offset_and_address() {
    let Some(cached) = CachedFile::new(1) else { return };
    for stats in with_every_backend(|engine| {
        let file = cached.open(DirectMode::Preferred);
        cached.check_read(engine, &file, 0, FILE_BYTES, 0);
        cached.check_read(engine, &file, 4096, 300_000, 4);
        cached.check_read(engine, &file, 12_345, 600_001, 7);
    }) {
        let from_device = stats.bytes_direct + stats.bytes_bounced;
        assert!(from_device < UNASKED_BYTES_MAX, "a ragged end is not worth the question: {stats:?}");
        assert_eq!(stats.bytes_buffered + from_device, FILE_BYTES as u64 + 900_001);
        assert!(stats.buffered_reason.is_some_and(|reason| reason.contains("page cache")));
    }
}

#[test]
fn bytes_that_are_not_cached_come_from_the_device() {
    let Some(cached) = CachedFile::new(2) else { return };
    if !cached.forget_all_but(0) {
        return;
    }
    for stats in with_every_backend(|engine| {
        cached.check_read(engine, &cached.open(DirectMode::Preferred), 0, FILE_BYTES, 0);
    }) {
        assert_eq!((stats.bytes_direct, stats.bytes_buffered), (FILE_BYTES as u64, 0));
        assert_eq!(stats.buffered_reason, None);
    }
}

#[test]
fn each_block_of_a_half_cached_file_takes_its_own_way() {
    let Some(cached) = CachedFile::new(3) else { return };
    for stats in with_every_backend(|engine| {
        if cached.forget_all_but(HALF) {
            cached.check_read(engine, &cached.open(DirectMode::Preferred), 0, FILE_BYTES, 4);
        }
    }) {
        assert!(stats.requests == 0 || (stats.bytes_bounced, stats.bytes_buffered) == (HALF, HALF), "{stats:?}");
    }
}

#[test]
fn required_direct_reads_and_tiny_ones_leave_the_cache_alone() {
    let Some(cached) = CachedFile::new(4) else { return };
    for stats in with_every_backend(|engine| {
        cached.check_read(engine, &cached.open(DirectMode::Required), 0, FILE_BYTES, 0);
        cached.check_read(engine, &cached.open(DirectMode::Preferred), 4096, 4096, 0);
    }) {
        assert_eq!((stats.bytes_direct, stats.bytes_buffered), (FILE_BYTES as u64 + 4096, 0));
    }
}

#[test]
fn neighbours_with_gaps_come_from_the_cache() {
    let Some(cached) = CachedFile::new(5) else { return };
    let ranges: Vec<_> = (0..100).map(|index| (index * 10_000, 8_000 + index)).collect();
    for stats in with_every_backend(|engine| {
        let file = cached.open(DirectMode::Preferred);
        let item = |&(at, bytes): &(usize, usize)| ReadItem {
            file: Arc::clone(&file),
            offset: at as u64,
            target: region_at(at % 64, bytes),
        };
        let (regions, result) = engine.read_batch(ranges.iter().map(item).collect()).expect("a request").wait();
        result.expect("a read");
        for (region, &(at, bytes)) in regions.expect("the memory").iter().zip(&ranges) {
            assert_eq!(difference(&bytes_of(&region.region()), &cached.data[at..at + bytes]), None);
        }
    }) {
        assert!(stats.bytes_buffered > stats.bytes_bounced, "{stats:?}");
    }
}

#[test]
fn a_stripe_is_asked_about_in_its_own_file() {
    const STRIPE_BYTES: u64 = 64 << 10;
    let (Some(one), Some(other)) = (CachedFile::new(6), CachedFile::new(7)) else { return };
    if !other.forget_all_but(0) {
        return;
    }
    let paths = [one.test_file.path.clone(), other.test_file.path.clone()];
    let layout = StripeLayout { stripe_bytes: STRIPE_BYTES, parts: 2 };
    let options = OpenOptions { access: Access::Read, create: false, direct: DirectMode::Preferred };
    let set = TensorFile::open_parts(&paths[0], &paths, layout, options).expect("a set");
    assert!(set.is_mostly_cached(&(0..STRIPE_BYTES)));
    assert!(!set.is_mostly_cached(&(STRIPE_BYTES..2 * STRIPE_BYTES)));
    assert!(!set.is_mostly_cached(&(0..2 * STRIPE_BYTES)), "two stripes");
    assert!(!set.is_mostly_cached(&(5..5)));
    let mut expected = Vec::new();
    for (one, other) in one.data.chunks(STRIPE_BYTES as usize).zip(other.data.chunks(STRIPE_BYTES as usize)) {
        expected.extend_from_slice(one);
        expected.extend_from_slice(other);
    }
    for stats in with_every_backend(|engine| {
        let (region, result) = engine.read(&set, 0, region_at(0, expected.len())).expect("a request").wait();
        result.expect("a read");
        let region = region.expect("the memory");
        assert_eq!(difference(&bytes_of(&region.region()), &expected), None);
    }) {
        assert_eq!((stats.bytes_direct, stats.bytes_buffered), (FILE_BYTES as u64, FILE_BYTES as u64));
    }
}

#[test]
fn bytes_that_were_just_written_and_not_synced_are_read() {
    let Some(mut cached) = CachedFile::new(8) else { return };
    cached.data[100_000..200_000].copy_from_slice(&random_bytes(9, 100_000));
    cached.file().write_all_at(&cached.data[100_000..200_000], 100_000).expect("a buffered write");
    with_every_backend(|engine| {
        cached.check_read(engine, &cached.open(DirectMode::Preferred), 0, FILE_BYTES, 0);
    });
}

#[test]
fn missing_pages_are_read_without_their_neighbours() {
    let Some(cached) = CachedFile::new(12) else { return };
    with_every_backend(|engine| {
        if !cached.forget_all_but(HALF / 8 * 7) {
            return;
        }
        let file = cached.open(DirectMode::Preferred);
        assert!(file.is_mostly_cached(&(0..HALF)));
        cached.check_read(engine, &file, 0, HALF as usize, 0);
        for page in (HALF..FILE_BYTES as u64).step_by(4096) {
            assert!(!file.is_mostly_cached(&(page..page + 4096)), "the page at {page} was read ahead");
        }
    });
}

/// A read that brings pages of its neighbours into the cache would spoil direct writes there: the kernel reports stale
/// pages as an error of the next sync.
#[test]
fn concurrent_cached_reads_and_direct_writes_spoil_neither() {
    let Some(mut cached) = CachedFile::new(10) else { return };
    for (kind, make) in all_real() {
        let engine = engine(small_config(2, SubmitMode::Batch), make);
        let writable = common::open(&cached.test_file.path, DirectMode::Preferred).expect("the test file");
        let mut random = Rng::new(11);
        for round in 0..ROUNDS {
            if round % 3 == 0 {
                // In large folios, not on the disk yet.
                cached.file().write_all_at(&cached.data, 0).expect("a buffered write");
            }
            let readable = cached.open(DirectMode::Preferred);
            let mut cuts: Vec<usize> = (0..40).map(|_| random.below(FILE_BYTES as u64) as usize).collect();
            cuts.sort_unstable();
            // Every other range is written, and the rest is read meanwhile.
            let (mut reads, mut writes) = (Vec::new(), Vec::new());
            for (index, cut) in cuts.windows(2).enumerate() {
                let range = cut[0]..cut[1];
                if index % 2 == 0 {
                    let target = region_at(0, range.len());
                    reads.push((range.clone(), engine.read(&readable, range.start as u64, target).expect("a request")));
                    continue;
                }
                let bytes = random_bytes(random.next_u64(), range.len());
                cached.data[range.clone()].copy_from_slice(&bytes);
                let durability = if random.chance(50) { Durability::Data } else { Durability::None };
                let options = WriteOptions { durability, ..WriteOptions::default() };
                let source = region_holding(range.start % 4096, &bytes).region();
                let write = engine.write(&writable, range.start as u64, source, options).expect("a request");
                writes.push((range.start, write));
            }
            for (range, read) in reads {
                let (region, result) = read.wait();
                result.expect("a read");
                let found = bytes_of(&region.expect("the memory").region());
                assert_eq!(difference(&found, &cached.data[range]), None);
            }
            for (at, write) in writes {
                write.wait().1.unwrap_or_else(|error| panic!("{kind:?}, round {round}, at {at}: {error}"));
            }
            cached.check_read(&engine, &readable, 0, FILE_BYTES, 0);
            cached.check_read(&engine, &writable, 0, FILE_BYTES, 0);
        }
    }
}
