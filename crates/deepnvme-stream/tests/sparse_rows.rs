//! Acquired rows are in memory, whatever was acquired before, and memory stays within its bound.

#![allow(clippy::unwrap_used)]

use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;

use deepnvme_file::VersionedFile;
use deepnvme_io::backend::BackendKind;
use deepnvme_io::mem::ReservedRange;
use deepnvme_io::{BackendFactory, Config, Engine};
use deepnvme_stream::{Error, RowLocations, RowTensor, SparseRowCache};
use deepnvme_testkit::faults::{FaultPlan, Faults};
use proptest::prelude::*;

struct World {
    cache: SparseRowCache,
    memory: ReservedRange,
    data: Vec<u8>,
    /// For each tensor: its offset in memory, bytes of a piece, and its bytes.
    parts: Vec<(usize, usize, usize)>,
    /// For each tensor: the file offsets of its pieces.
    places: Vec<Vec<usize>>,
    path: PathBuf,
    bound: usize,
    _folder: tempfile::TempDir,
}

/// The sizes of a world.
#[derive(Clone, Copy)]
struct Shape {
    /// Rows of each tensor.
    items: usize,
    /// Bytes of a contiguous row, and of the last one.
    row_bytes: usize,
    last_bytes: usize,
    /// Bytes of half a row of the other tensor.
    piece_bytes: usize,
    /// Rows that the memory bound has room for.
    kept_items: usize,
}

impl Shape {
    /// Rows of equal size.
    fn even(items: usize, row_bytes: usize, piece_bytes: usize, kept_items: usize) -> Self {
        Self { items, row_bytes, last_bytes: row_bytes, piece_bytes, kept_items }
    }
}

impl World {
    /// Two tensors: contiguous rows, of which the last may be short, and rows of two pieces each, in random order.
    fn new(shape: Shape) -> Self {
        Self::on(Arc::new(Engine::new(Config::default()).unwrap()), shape)
    }

    fn on(engine: Arc<Engine>, shape: Shape) -> Self {
        let Shape { items, row_bytes, last_bytes, piece_bytes, kept_items } = shape;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("experts.bin");
        let rows = row_bytes * (items - 1) + last_bytes;
        let mut random = fastrand::Rng::with_seed((items * row_bytes) as u64);
        let mut data = vec![0; 11 + rows + items * 2 * piece_bytes];
        random.fill(&mut data);
        std::fs::write(&path, &data).unwrap();
        let mut order: Vec<usize> = (0..items * 2).collect();
        random.shuffle(&mut order);
        let at_of = |piece: usize| 11 + rows + piece * piece_bytes;
        let each =
            order.chunks(2).map(|pair| pair.iter().map(|piece| (0, at_of(*piece) as u64, piece_bytes)).collect());
        let second = rows.next_multiple_of(64);
        let parts = vec![
            RowTensor {
                first_row: 0,
                rows: items,
                at: 0,
                row_bytes,
                bytes: rows,
                locations: RowLocations::Contiguous { source: 0, offset: 11 },
            },
            RowTensor {
                first_row: 0,
                rows: items,
                at: second,
                row_bytes: 2 * piece_bytes,
                bytes: items * 2 * piece_bytes,
                locations: RowLocations::PerRow(each.collect()),
            },
        ];
        let memory = ReservedRange::new(second + items * 2 * piece_bytes, row_bytes).unwrap();
        let source = VersionedFile::open(path.clone()).unwrap();
        let bound = (kept_items * (row_bytes + 2 * piece_bytes)) as u64;
        let cache = SparseRowCache::new(engine, vec![source], parts, memory.clone(), bound).unwrap();
        let places = vec![
            (0..items).map(|item| 11 + item * row_bytes).collect(),
            order.iter().map(|piece| at_of(*piece)).collect(),
        ];
        let parts = vec![(0, row_bytes, rows), (second, piece_bytes, items * 2 * piece_bytes)];
        Self { cache, memory, data, parts, places, path, bound: bound as usize, _folder: folder }
    }

    fn bound(&self) -> usize {
        self.bound
    }

    /// Bytes of the pages that contain these rows.
    fn page_bytes(&self, items: &[usize]) -> usize {
        let mut pages = std::collections::BTreeSet::new();
        let (_, row_bytes, rows) = self.parts[0];
        let (second, piece_bytes, _) = self.parts[1];
        for item in items {
            let row = item * row_bytes..((item + 1) * row_bytes).min(rows);
            let piece = second + item * 2 * piece_bytes..second + (item + 1) * 2 * piece_bytes;
            for range in [row, piece] {
                pages.extend(range.start / 4096..range.end.div_ceil(4096));
            }
        }
        pages.len() * 4096
    }

    /// Bytes of the tensors' addresses that have memory now, according to the kernel.
    fn resident_bytes(&self) -> usize {
        // A line of smaps may cover neighbouring memory as well.
        let pages = self.memory.region_mut(0..1).addr() / 4096
            ..(self.memory.region_mut(0..1).addr() + self.memory.bytes()) / 4096;
        let mut entries = vec![0; pages.len() * 8];
        let file = std::fs::File::open("/proc/self/pagemap").unwrap();
        file.read_exact_at(&mut entries, pages.start as u64 * 8).unwrap();
        // The highest bit of each little-endian entry means that the page is present.
        entries.chunks_exact(8).filter(|entry| entry[7] & 0x80 != 0).count() * 4096
    }

    fn has(&self, item: usize) -> bool {
        let same = |at: usize, from: usize, len: usize| {
            let mut bytes = vec![0; len];
            self.memory.region_mut(at..at + len).region().copy_to_slice(0, &mut bytes);
            bytes == self.data[from..from + len]
        };
        let (_, row_bytes, rows) = self.parts[0];
        let row = same(item * row_bytes, self.places[0][item], row_bytes.min(rows - item * row_bytes));
        let (start, piece_bytes, _) = self.parts[1];
        row && [2 * item, 2 * item + 1]
            .iter()
            .all(|piece| same(start + piece * piece_bytes, self.places[1][*piece], piece_bytes))
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn acquired_rows_are_in_memory(
        items in 1..40usize, row_bytes in 1..9000usize, short in any::<prop::sample::Index>(),
        piece_bytes in 1..9000usize, kept in 1..12usize,
        requests in proptest::collection::vec(proptest::collection::vec(any::<prop::sample::Index>(), 0..10), 1..30),
    ) {
        let last_bytes = short.index(row_bytes) + 1;
        let world = World::new(Shape { items, row_bytes, last_bytes, piece_bytes, kept_items: kept });
        for request in requests {
            let wanted: Vec<usize> = request.iter().map(|index| index.index(items)).collect();
            let mut distinct = wanted.clone();
            distinct.sort_unstable();
            distinct.dedup();
            let bytes = world.page_bytes(&distinct);
            let bound = kept * (row_bytes + 2 * piece_bytes);
            match world.cache.acquire(&wanted) {
                Ok(()) => {
                    prop_assert!(bytes <= bound);
                    for item in &wanted {
                        prop_assert!(world.has(*item));
                    }
                    prop_assert!(!world.cache.was_missing_row_used(0).unwrap());
                    world.cache.release(&wanted);
                }
                Err(error) => prop_assert!(matches!(error, Error::TooMany { .. }) && bytes > bound, "{error}"),
            }
            prop_assert!(!world.cache.was_missing_row_used(items - 1).unwrap());
        }
    }

    #[test]
    fn short_transfers_are_completed_and_failures_are_errors(
        items in 1..30usize, row_bytes in 1..9000usize, piece_bytes in 1..9000usize, seed: u64,
        eio in prop_oneof![Just(0u32), 1..300u32],
        requests in proptest::collection::vec(proptest::collection::vec(any::<prop::sample::Index>(), 0..6), 1..30),
    ) {
        let faults = Faults::new(FaultPlan {
            seed, eio, short: 200, short_anywhere: true, eintr: 50, slow: 50, reorder: true, ..FaultPlan::default()
        });
        let factory: BackendFactory =
            Arc::new(move |setup| Ok(Box::new(faults.wrap(deepnvme_io::backend::open(BackendKind::Threads, setup)?))));
        let engine = Arc::new(Engine::with_backends(Config { workers: 2, ..Config::default() }, factory).unwrap());
        let world = World::on(engine, Shape::even(items, row_bytes, piece_bytes, 6));
        for request in requests {
            let wanted: Vec<usize> = request.iter().map(|index| index.index(items)).collect();
            match world.cache.acquire(&wanted) {
                Ok(()) => {
                    prop_assert!(wanted.iter().all(|item| world.has(*item)));
                    world.cache.release(&wanted);
                }
                Err(Error::TooMany { bytes, bytes_max }) => {
                    prop_assert!(bytes > bytes_max && world.page_bytes(&wanted) > world.bound());
                }
                Err(error) => prop_assert!(eio > 0 && matches!(error, Error::Io(_)), "{error}"),
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn uses_of_missing_rows_are_found(
        items in 2..40usize, row_bytes in 8191..30_000usize, piece_bytes in 4096..15_000usize, kept in 2..12usize,
        is_second: bool, used in any::<prop::sample::Index>(),
        requests in proptest::collection::vec(proptest::collection::vec(any::<prop::sample::Index>(), 0..3), 1..10),
    ) {
        let world = World::new(Shape::even(items, row_bytes, piece_bytes, kept));
        for request in requests {
            let wanted: Vec<usize> = request.iter().map(|index| index.index(items)).collect();
            if world.cache.acquire(&wanted).is_err() {
                continue;
            }
            let used = used.index(items);
            let (at, bytes) = if is_second { (world.parts[1].0, 2 * piece_bytes) } else { (0, row_bytes) };
            world.memory.region_mut(at + used * bytes..at + (used + 1) * bytes).region().copy_to_slice(0, &mut vec![0; bytes]);
            if world.cache.was_missing_row_used(0).unwrap() {
                prop_assert!(!wanted.contains(&used));
            } else {
                // It is wanted, or still there from before.
                prop_assert!(world.has(used));
            }
            prop_assert!(!world.cache.was_missing_row_used(0).unwrap(), "found once");
            prop_assert!(wanted.iter().all(|item| world.has(*item)));
            world.cache.release(&wanted);
        }
        prop_assert!(world.resident_bytes() <= world.bound());
    }
}

#[test]
fn frequent_rows_stay() {
    let world = World::new(Shape::even(20, 4096, 4096, 4));
    for round in 0..30 {
        let wanted = [0, 1, 2 + round % 18];
        world.cache.acquire(&wanted).unwrap();
        world.cache.release(&wanted);
    }
    let stats = world.cache.stats();
    assert!(stats.hits >= 2 * 29, "{stats:?}");
    assert_eq!(stats.hits + stats.waits, 90);
    assert_eq!(stats.bytes_read, stats.waits * 3 * 4096);
}

#[test]
fn held_rows_are_not_evicted() {
    let world = World::new(Shape::even(10, 4096, 4096, 3));
    world.cache.acquire(&[0, 1]).unwrap();
    world.cache.acquire(&[2]).unwrap();
    let refused = world.cache.acquire(&[3]).unwrap_err();
    assert!(refused.to_string().contains("are needed at once"), "{refused}");
    assert!(world.has(0) && world.has(1) && world.has(2));
    world.cache.release(&[1]);
    world.cache.acquire(&[3]).unwrap();
    assert!(world.has(0) && world.has(2) && world.has(3));
}

#[test]
fn memory_stays_within_its_bound() {
    let world = World::new(Shape::even(64, 1 << 20, 1 << 19, 4));
    for item in 0..64 {
        world.cache.acquire(&[item]).unwrap();
        world.cache.release(&[item]);
        assert!(world.resident_bytes() <= world.bound(), "{} of {} bytes", world.resident_bytes(), world.bound());
    }
    assert!(world.resident_bytes() > 0);
}

#[test]
fn rows_of_partial_pages_stay_within_the_bound() {
    for row_bytes in [1536, 5760, 100, 4096, 70_000] {
        let items = (24 << 20) / row_bytes;
        let world = World::new(Shape::even(items, row_bytes, 8, (1 << 20) / row_bytes));
        let bound = world.bound();
        let (mut most, mut random) = (0, fastrand::Rng::with_seed(row_bytes as u64));
        for round in 0..3000 {
            // In order, and at random.
            let first = if round % 2 == 0 { round * 7 % (items - 3) } else { random.usize(..items - 3) };
            let wanted = [first, first + 2, random.usize(..items)];
            world.cache.acquire(&wanted).unwrap();
            assert!(wanted.iter().all(|item| world.has(*item)));
            world.cache.release(&wanted);
            if round % 50 == 49 {
                most = most.max(world.resident_bytes());
            }
        }
        assert!(most <= bound, "{most} bytes are resident for rows of {row_bytes}, and the bound is {bound}");
        assert!(most > bound / 2, "{most} of {bound} bytes are used for rows of {row_bytes}");
    }
}

#[test]
fn large_rows_stay_within_the_bound() {
    let shape = Shape { last_bytes: 5 << 20, ..Shape::even(12, 17 << 20, 100, 3) };
    let world = World::new(shape);
    for round in 0..24 {
        world.cache.acquire(&[round * 5 % 12]).unwrap();
        let resident = world.resident_bytes();
        assert!(resident <= world.bound(), "{resident} of {} bytes", world.bound());
        world.cache.release(&[round * 5 % 12]);
    }
}

#[test]
fn failed_reads_take_no_memory() {
    let plan = FaultPlan { eio: 1000, ..FaultPlan::default() };
    let factory: BackendFactory = Arc::new(move |setup| {
        Ok(Box::new(Faults::new(plan.clone()).wrap(deepnvme_io::backend::open(BackendKind::Threads, setup)?)))
    });
    let engine = Arc::new(Engine::with_backends(Config { workers: 2, ..Config::default() }, factory).unwrap());
    let world = World::on(engine, Shape::even(64, 8192, 4096, 8));
    (0..64).for_each(|item| assert!(world.cache.acquire(&[item]).is_err()));
    assert_eq!(world.resident_bytes(), 0);
}

#[test]
fn an_unknown_row_and_a_changed_file_are_errors() {
    let world = World::new(Shape::even(10, 4096, 4096, 3));
    assert!(matches!(world.cache.acquire(&[10]), Err(Error::Plan(_))));
    std::fs::write(&world.path, b"short").unwrap();
    let changed = world.cache.acquire(&[1]).unwrap_err();
    assert!(changed.to_string().contains("open the model again"), "{changed}");
    let missing = world.cache.acquire(&[1]).unwrap_err();
    assert!(matches!(missing, Error::Changed { .. }), "it is not taken for there: {missing}");
}
