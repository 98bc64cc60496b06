//! Decoding without pool threads, so that the waiting thread does everything in a fixed order.

use std::sync::Arc;
use std::time::{Duration, Instant};

use deepnvme_codec::{Float, cast};
use deepnvme_file::VersionedFile;
use deepnvme_io::backend::BackendKind;
use deepnvme_io::mem::{Buffer, Region};
use deepnvme_io::{BackendFactory, Config, Engine};
use deepnvme_testkit::faults::{FaultPlan, Faults};

use super::{BUFFERS_BYTES, DecodeJob, DecodePool, lock};
use crate::compressed_cache::CompressedCache;
use crate::decode_task::{DecodeTask, JobCost};
use crate::layer_group::{Conversion, Decoding};

const JOB_BYTES: usize = 1 << 20;
const FAR: Duration = Duration::from_secs(600);

struct World {
    pool: DecodePool,
    source: VersionedFile,
    wide: Vec<u8>,
    entries: usize,
    _folder: tempfile::TempDir,
}

impl World {
    fn new(jobs: usize) -> Self {
        Self::with_cache(jobs, &[])
    }

    fn with_cache(jobs: usize, entries: &[usize]) -> Self {
        Self::on(&Arc::new(Engine::new(Config::default()).unwrap()), jobs, entries, 0)
    }

    fn on(engine: &Arc<Engine>, jobs: usize, entries: &[usize], threads: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut bytes = vec![0; 7 + jobs * JOB_BYTES];
        fastrand::Rng::with_seed(3).fill(&mut bytes);
        let path = folder.path().join("weights");
        std::fs::write(&path, &bytes).unwrap();
        let mut wide = vec![0; jobs * JOB_BYTES * 2];
        cast::convert(Float::Bf16, Float::F32, &bytes[7..], &mut wide).unwrap();
        let pool = DecodePool::start_with(engine, JOB_BYTES, CompressedCache::new(entries).unwrap(), threads).unwrap();
        Self { pool, source: VersionedFile::open(path).unwrap(), wide, entries: entries.len(), _folder: folder }
    }

    fn begin(&self, range: std::ops::Range<usize>) -> (Arc<DecodeTask>, Region) {
        self.begin_at(7, range)
    }

    fn begin_at(&self, start: u64, range: std::ops::Range<usize>) -> (Arc<DecodeTask>, Region) {
        let memory = Buffer::zeroed(range.len() * JOB_BYTES * 2).unwrap().into_region();
        let (region, mut rest, mut jobs) = (memory.region(), memory, Vec::new());
        for index in range {
            let (target, behind) = rest.split_at(2 * JOB_BYTES);
            rest = behind;
            let conversion = conversion(start, index);
            let entry = (index < self.entries).then_some(index);
            jobs.push(DecodeJob { file: Arc::clone(self.source.file()), conversion, target, entry });
        }
        (self.pool.begin(jobs, false), region)
    }

    fn assert_came(&self, task: &DecodeTask, region: &Region, first: usize) {
        assert_eq!(self.bytes_read(task, region, first) as usize * 2, region.len());
    }

    /// Bytes read, after checking the result.
    fn bytes_read(&self, task: &DecodeTask, region: &Region, first: usize) -> u64 {
        let bytes = task.finish().unwrap().result.unwrap().bytes_read;
        let mut memory = vec![0; region.len()];
        region.copy_to_slice(0, &mut memory);
        let at = first * JOB_BYTES * 2;
        assert!(memory == self.wide[at..at + memory.len()]);
        bytes
    }

    /// Jobs started, jobs without a buffer, and buffers.
    fn counts(&self) -> (usize, usize, usize) {
        let jobs = lock(&self.pool.shared.jobs);
        (jobs.started.len(), jobs.waiting.len(), jobs.started.len() + jobs.spare.len() + jobs.unallocated)
    }
}

#[test]
fn all_buffers_are_in_use_and_the_waiting_thread_decodes() {
    let world = World::new(40);
    let buffers = world.pool.shared.buffers;
    assert!(world.pool.buffers_bytes() <= BUFFERS_BYTES as u64 && buffers > 4);
    let (task, region) = world.begin(0..40);
    assert_eq!(world.counts(), (buffers, 40 - buffers, buffers));
    assert!(!task.is_done());
    assert!(world.pool.help(&task, Instant::now() + FAR));
    world.assert_came(&task, &region, 0);
    assert_eq!(world.counts(), (0, 0, buffers), "no buffer is lost");
}

#[test]
fn prioritised_tasks_come_first() {
    let world = World::new(60);
    let (early, before) = world.begin(0..50);
    let (wanted, region) = world.begin(50..60);
    world.pool.prioritise(&wanted);
    assert!(world.pool.help(&wanted, Instant::now() + FAR));
    world.assert_came(&wanted, &region, 50);
    assert!(!early.is_done(), "a task without waiters was done first");
    assert!(world.pool.help(&early, Instant::now() + FAR));
    world.assert_came(&early, &before, 0);
}

#[test]
fn help_respects_its_deadline() {
    let world = World::new(30);
    let (task, region) = world.begin(0..30);
    assert!(!world.pool.help(&task, Instant::now()));
    assert!(world.pool.help(&task, Instant::now() + FAR));
    world.assert_came(&task, &region, 0);
}

#[test]
fn several_threads_wait_for_several_tasks() {
    let world = World::new(48);
    let tasks: Vec<_> = (0..4).map(|index| (index, world.begin(index * 12..(index + 1) * 12))).collect();
    std::thread::scope(|scope| {
        for (index, (task, region)) in &tasks {
            let world = &world;
            scope.spawn(move || {
                assert!(world.pool.help(task, Instant::now() + FAR));
                world.assert_came(task, region, index * 12);
            });
        }
    });
    let (reading, waiting, buffers) = world.counts();
    assert_eq!((reading, waiting, buffers), (0, 0, world.pool.shared.buffers));
}

#[test]
fn reads_that_cannot_start_end_their_jobs() {
    let world = World::new(1);
    // No file has this offset, so no read starts. Some of these jobs have no buffer at first.
    let (before, region) = world.begin(0..1);
    let (task, _) = world.begin_at(u64::MAX - (1 << 40), 0..60);
    assert!(world.pool.help(&task, Instant::now() + FAR));
    assert!(task.finish().unwrap().result.is_err());
    assert!(world.pool.help(&before, Instant::now() + FAR));
    world.assert_came(&before, &region, 0);
    assert_eq!(world.counts(), (0, 0, world.pool.shared.buffers), "no buffer is lost");
}

#[test]
fn waiters_see_reads_that_could_not_start() {
    let world = World::new(40);
    let (_, _region) = world.begin(0..40);
    let (task, _) = world.begin_at(u64::MAX - (1 << 40), 0..3);
    std::thread::scope(|scope| {
        let all = [1, 2].map(|_| scope.spawn(|| world.pool.help(&task, Instant::now() + FAR)));
        all.into_iter().for_each(|one| assert!(one.join().unwrap()));
    });
    assert!(task.finish().unwrap().result.is_err());
}

#[test]
fn cached_weights_are_read_once_and_need_no_buffer() {
    let world = World::with_cache(40, &[JOB_BYTES + 4096; 10]);
    let buffers = world.pool.shared.buffers;
    for bytes_read in [40 * JOB_BYTES, 30 * JOB_BYTES, 30 * JOB_BYTES] {
        let (task, region) = world.begin(0..40);
        let (reading, waiting, _) = world.counts();
        assert_eq!((reading, waiting), (10 + buffers, 30 - buffers), "ten besides the jobs with buffers");
        assert!(world.pool.help(&task, Instant::now() + FAR));
        assert_eq!(world.bytes_read(&task, &region, 0), bytes_read as u64);
        assert_eq!(world.counts(), (0, 0, buffers), "no buffer is lost");
    }
}

#[test]
fn a_cache_entry_survives_a_failed_read() {
    let world = World::with_cache(40, &[JOB_BYTES + 4096; 3]);
    let (task, _) = world.begin_at(u64::MAX - (1 << 40), 0..3);
    assert!(task.finish().unwrap().result.is_err());
    for read in [40, 37] {
        let (task, region) = world.begin(0..40);
        assert!(world.pool.help(&task, Instant::now() + FAR));
        assert_eq!(world.bytes_read(&task, &region, 0), read * JOB_BYTES as u64, "three are cached then");
    }
    assert_eq!(world.counts(), (0, 0, world.pool.shared.buffers));
}

/// The conversion of one job. The first job's bytes begin at `start`.
fn conversion(start: u64, index: usize) -> Conversion {
    Conversion {
        source: 0,
        offset: start + (index * JOB_BYTES) as u64,
        bytes: JOB_BYTES,
        at: 0,
        target_bytes: 2 * JOB_BYTES,
        decoding: Decoding::Cast { from: Float::Bf16, to: Float::F32 },
        trim: (0, 0),
        final_cast: None,
    }
}

/// Jobs whose targets are too small, to simulate a bug.
fn begin_defective(world: &World, jobs: usize) -> Arc<DecodeTask> {
    let job = |index: usize| {
        let target = Buffer::zeroed(4096).unwrap().into_region();
        DecodeJob { file: Arc::clone(world.source.file()), conversion: conversion(7, index), target, entry: None }
    };
    world.pool.begin((0..jobs).map(job).collect(), false)
}

#[test]
fn a_panic_while_decoding_reaches_the_waiter() {
    let world = World::new(4);
    let task = begin_defective(&world, 4);
    assert!(world.pool.help(&task, Instant::now() + FAR));
    let failed = task.finish().unwrap();
    assert_eq!(failed.targets.len(), 4, "its memory is returned");
    let text = failed.result.unwrap_err().to_string();
    assert!(text.contains("weights") && text.contains("panicked"), "{text}");
    let (task, region) = world.begin(0..4);
    assert!(world.pool.help(&task, Instant::now() + FAR));
    world.assert_came(&task, &region, 0);
    assert_eq!(world.counts(), (0, 0, world.pool.shared.buffers), "no buffer is lost");
}

#[test]
fn threads_survive_a_panic_while_decoding() {
    let world = World::on(&Arc::new(Engine::new(Config::default()).unwrap()), 4, &[], 1);
    let task = begin_defective(&world, 4);
    assert!(task.wait_timeout(FAR), "the pool ends it");
    assert!(task.finish().unwrap().result.is_err());
    let (task, region) = world.begin(0..4);
    assert!(task.wait_timeout(FAR));
    world.assert_came(&task, &region, 0);
}

#[test]
fn helping_does_not_wait_for_other_tasks() {
    let plan = FaultPlan { seed: 1, slow: 1000, slow_max: Duration::from_secs(3), ..FaultPlan::default() };
    let factory: BackendFactory = Arc::new(move |setup| {
        Ok(Box::new(Faults::new(plan.clone()).wrap(deepnvme_io::backend::open(BackendKind::Threads, setup)?)))
    });
    let engine = Engine::with_backends(Config { workers: 1, ..Config::default() }, factory).unwrap();
    let world = World::on(&Arc::new(engine), 8, &[], 0);
    let (others, _region) = world.begin(0..8);
    // Another thread holds the only job of this task.
    let wanted = Arc::new(DecodeTask::new(1));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(30));
            let done = JobCost { read: None, converting: Duration::ZERO };
            wanted.end(Buffer::zeroed(4096).unwrap().into_region(), Ok(done));
            drop(lock(&world.pool.shared.jobs));
            world.pool.shared.changed.notify_all();
        });
        assert!(world.pool.help(&wanted, Instant::now() + FAR));
        assert!(!others.is_done(), "it waited for another task");
        assert_eq!(world.counts().0, 8, "no read has finished");
    });
}
