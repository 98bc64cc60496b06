//! Reading in any order, from the disk and from the page cache.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail like tests")]

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_file::{BUFFER_BYTES, BUFFERS, FileReader, StripeSet, Target};
use deepnvme_io::mem::{Region, RegionMut};
use deepnvme_io::{BackendChoice, Config, DirectMode, Engine, ErrorKind, WriteOptions};
use deepnvme_testkit::rng::random_bytes as random;
use proptest::prelude::*;

const FILE_BYTES: usize = BUFFER_BYTES * 5 + 4321;

/// A file of random bytes.
struct Scratch {
    _folder: tempfile::TempDir,
    path: PathBuf,
    data: Vec<u8>,
}

impl Scratch {
    fn new(bytes: usize, seed: u64) -> Self {
        let (folder, data) = (tempfile::tempdir().unwrap(), random(bytes, seed));
        let path = folder.path().join("file");
        fs::write(&path, &data).unwrap();
        File::open(&path).unwrap().sync_all().unwrap();
        Self { _folder: folder, path, data }
    }

    /// Drops a range from the page cache if the file system allows. 0 bytes: everything from `start` on.
    fn forget(&self, start: u64, bytes: u64) {
        let bytes = std::num::NonZeroU64::new(bytes);
        rustix::fs::fadvise(File::open(&self.path).unwrap(), start, bytes, rustix::fs::Advice::DontNeed).unwrap();
    }
}

fn engine(config: Config) -> Arc<Engine> {
    Arc::new(Engine::new(config).unwrap())
}

fn zeroed(bytes: usize) -> RegionMut {
    RegionMut::from_vec(vec![0; bytes])
}

fn bytes_of(region: &RegionMut) -> Vec<u8> {
    let mut out = vec![0; region.len()];
    region.region().copy_to_slice(0, &mut out);
    out
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// Into a slice, or into a `RegionMut`.
    Small { jump: Jump, bytes: usize, is_region: bool },
    /// Bypassing the windows.
    Large { jump: Jump, bytes: usize },
    /// Drops a range from the page cache, or loads it.
    Cache { start: usize, bytes: usize, is_forgotten: bool },
}

#[derive(Clone, Copy, Debug)]
enum Jump {
    /// A short jump, as over a record's header.
    By(usize),
    To(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let jump = || prop_oneof![3 => (0..200_usize).prop_map(Jump::By), 1 => (0..FILE_BYTES + 100).prop_map(Jump::To)];
    let size = prop_oneof![0..100_usize, 0..70_000_usize, 0..BUFFER_BYTES];
    let small =
        (jump(), size, any::<bool>()).prop_map(|(jump, bytes, is_region)| Step::Small { jump, bytes, is_region });
    let large = (jump(), 0..2 * BUFFER_BYTES).prop_map(|(jump, bytes)| Step::Large { jump, bytes });
    let cache = (0..FILE_BYTES, 1..FILE_BYTES, any::<bool>()).prop_map(|(start, bytes, is_forgotten)| Step::Cache {
        start,
        bytes,
        is_forgotten,
    });
    prop::collection::vec(prop_oneof![4 => small, 2 => large, 1 => cache], 1..25)
}

fn run(reader: &mut FileReader, scratch: &Scratch, steps: &[Step]) {
    let mut position = 0;
    for step in steps {
        let to = |jump| match jump {
            Jump::By(bytes) => position + bytes,
            Jump::To(at) => at,
        };
        let (at, got, most) = match *step {
            Step::Cache { start, bytes, is_forgotten: true } => {
                scratch.forget(start as u64, bytes as u64);
                continue;
            }
            Step::Cache { start, bytes, .. } => {
                let end = (start + bytes).min(FILE_BYTES);
                let file = File::open(&scratch.path).unwrap();
                std::os::unix::fs::FileExt::read_exact_at(&file, &mut vec![0; end - start], start as u64).unwrap();
                continue;
            }
            Step::Small { jump, bytes, is_region: false } => {
                let mut out = vec![0; bytes];
                let read = reader.read_at(to(jump) as u64, &mut out).unwrap();
                out.truncate(read);
                (to(jump), out, bytes)
            }
            Step::Small { jump, bytes, .. } => {
                let target = zeroed(bytes);
                let mut read = bytes;
                if !reader.read_held(to(jump) as u64, &target) {
                    read = reader.read_into(to(jump) as u64, &target).unwrap();
                }
                (to(jump), bytes_of(&target)[..read].to_vec(), bytes)
            }
            Step::Large { jump, bytes } => {
                let at = to(jump).min(FILE_BYTES);
                let bytes = bytes.min(FILE_BYTES - at);
                let (target, result) = reader.start_read(at as u64, zeroed(bytes)).unwrap().wait();
                assert!(result.is_ok(), "{result:?}");
                // Bytes from a window were split off, so only the rest is returned.
                let rest = bytes_of(&target.unwrap());
                let at = at + bytes - rest.len();
                (at, rest.clone(), rest.len())
            }
        };
        let expected = &scratch.data[at.min(FILE_BYTES)..(at + most).min(FILE_BYTES)];
        assert_eq!(got.len(), expected.len(), "{step:?} at {at}");
        assert!(got == expected, "{step:?} at {at}");
        position = (at + most).min(FILE_BYTES);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn any_program_of_reads_agrees_with_the_file(
        steps in steps(),
        direct in prop_oneof![Just(DirectMode::Preferred), Just(DirectMode::Disabled)],
        backend in prop_oneof![Just(BackendChoice::Auto), Just(BackendChoice::Threads)],
    ) {
        let scratch = Scratch::new(FILE_BYTES, 5);
        scratch.forget(0, 0);
        let config = Config { direct, backend, ..Config::default() };
        let mut reader = FileReader::open(engine(config), &Target::from(&scratch.path)).unwrap();
        run(&mut reader, &scratch, &steps);
    }
}

/// A large record is complete, including bytes that a window had prefetched.
#[test]
fn records_in_a_row_come_whole() {
    let scratch = Scratch::new(FILE_BYTES, 6);
    for is_cold in [true, false] {
        let mut reader = FileReader::open(engine(Config::default()), &Target::from(&scratch.path)).unwrap();
        if is_cold {
            scratch.forget(0, 0);
        }
        let (mut at, record_bytes) = (0, BUFFER_BYTES + 777);
        while at + 30 + record_bytes <= FILE_BYTES {
            let mut header = [0; 30];
            assert_eq!(reader.read_at(at as u64, &mut header).unwrap(), 30);
            assert_eq!(header, scratch.data[at..at + 30]);
            at += 48;
            let whole = zeroed(record_bytes);
            let region = whole.region();
            reader.start_read(at as u64, whole).unwrap().wait().1.unwrap();
            let mut out = vec![0; record_bytes];
            region.copy_to_slice(0, &mut out);
            assert!(out == scratch.data[at..at + record_bytes], "the record at {at}");
            at += record_bytes;
        }
    }
}

#[test]
fn cached_pages_are_not_fetched_again() {
    let scratch = Scratch::new(FILE_BYTES, 7);
    let engine = engine(Config::default());
    let mut reader = FileReader::open(Arc::clone(&engine), &Target::from(&scratch.path)).unwrap();
    if !reader.is_cached(&(0..FILE_BYTES as u64)) {
        // Unknown before Linux 6.5.
        return;
    }
    let target = zeroed(FILE_BYTES);
    assert_eq!(reader.read_into(0, &target).unwrap(), FILE_BYTES);
    assert!(bytes_of(&target) == scratch.data);
    assert_eq!(reader.read_at(5, &mut [0; 10]).unwrap(), 10);
    assert_eq!(engine.stats().bytes_read, 0, "the engine had nothing to do");
    scratch.forget(0, 0);
    if !reader.is_cached(&(0..FILE_BYTES as u64)) {
        assert_eq!(reader.read_into(0, &target).unwrap(), FILE_BYTES);
        assert!(engine.stats().bytes_read >= FILE_BYTES as u64 - BUFFER_BYTES as u64);
    }
}

#[test]
fn where_direct_reads_are_required_the_page_cache_is_left_alone() {
    let scratch = Scratch::new(100_000, 8);
    let engine = engine(Config { direct: DirectMode::Required, ..Config::default() });
    let Ok(mut reader) = FileReader::open(Arc::clone(&engine), &Target::from(&scratch.path)) else {
        // The file system lacks direct I/O.
        return;
    };
    assert!(!reader.is_cached(&(0..100_000)));
    let target = zeroed(100_000);
    assert_eq!(reader.read_into(0, &target).unwrap(), 100_000);
    assert!(bytes_of(&target) == scratch.data);
    assert_eq!(engine.stats().bytes_buffered, 0);
}

#[test]
fn a_file_that_shrinks_is_an_error_from_the_disk_and_from_the_cache() {
    for is_cold in [true, false] {
        let scratch = Scratch::new(1 << 20, 9);
        let mut reader = FileReader::open(engine(Config::default()), &Target::from(&scratch.path)).unwrap();
        File::options().write(true).open(&scratch.path).unwrap().set_len(1000).unwrap();
        if is_cold {
            scratch.forget(0, 0);
        }
        for bytes in [100, 500_000] {
            let error = reader.read_into(200_000, &zeroed(bytes)).unwrap_err();
            assert_eq!((error.kind(), error.path()), (ErrorKind::UnexpectedEof, Some(scratch.path.as_path())));
        }
    }
}

#[test]
fn a_reader_holds_no_more_than_its_windows() {
    let scratch = Scratch::new(BUFFER_BYTES * (BUFFERS + 3), 10);
    scratch.forget(0, 0);
    let engine = engine(Config::default());
    let mut reader = FileReader::open(Arc::clone(&engine), &Target::from(&scratch.path)).unwrap();
    let mut out = vec![0; 30_000];
    for at in (0..BUFFER_BYTES * 3).step_by(out.len()) {
        reader.read_at(at as u64, &mut out).unwrap();
        // The window in which this read ended may be the first of the held ones.
        let end = at + out.len();
        let ahead = engine.stats().bytes_read.saturating_sub(end as u64);
        assert!(ahead <= (BUFFERS * BUFFER_BYTES) as u64, "{ahead} bytes were fetched ahead of {end}");
    }
}

#[test]
fn stripe_sets_are_read_in_any_order_too() {
    let (folder, data) = (tempfile::tempdir().unwrap(), random(3_000_000, 11));
    let part = |name: &str| Path::new(folder.path()).join(name);
    let set = StripeSet::new(vec![part("a"), part("b"), part("c")], 65_536).unwrap();
    let engine = engine(Config::default());
    let options =
        deepnvme_io::OpenOptions { access: deepnvme_io::Access::Write, create: true, direct: DirectMode::Preferred };
    let file = deepnvme_file::open(&Target::Stripes(set.clone()), options).unwrap();
    engine.write(&file, 0, Region::from_vec(data.clone()), WriteOptions::default()).unwrap().wait().1.unwrap();
    let mut reader = FileReader::open(engine, &Target::Stripes(set)).unwrap();
    for (at, bytes) in [(2_999_000, 1000), (0, 10), (20, 700_000), (1, 2_999_999)] {
        let target = zeroed(bytes);
        assert_eq!(reader.read_into(at as u64, &target).unwrap(), bytes);
        assert!(bytes_of(&target) == data[at..at + bytes]);
    }
}
