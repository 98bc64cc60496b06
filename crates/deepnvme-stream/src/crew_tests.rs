//! Conversions without threads, so that who waits does everything, one step after the other.

use std::sync::Arc;
use std::time::{Duration, Instant};

use deepnvme_codec::{Float, cast};
use deepnvme_io::mem::{Buffer, Region};
use deepnvme_io::{Config, Engine};

use super::{BUFFERS_BYTES, Crew, Job, lock};
use crate::source::Source;
use crate::task::Task;
use crate::unit::{Arrival, Conversion};

const JOB_BYTES: usize = 1 << 20;
const FAR: Duration = Duration::from_secs(600);

struct World {
    crew: Crew,
    source: Source,
    wide: Vec<u8>,
    _folder: tempfile::TempDir,
}

impl World {
    fn new(jobs: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut bytes = vec![0; 7 + jobs * JOB_BYTES];
        fastrand::Rng::with_seed(3).fill(&mut bytes);
        let path = folder.path().join("weights");
        std::fs::write(&path, &bytes).unwrap();
        let mut wide = vec![0; jobs * JOB_BYTES * 2];
        cast::convert(Float::Bf16, Float::F32, &bytes[7..], &mut wide).unwrap();
        let engine = Arc::new(Engine::new(Config::default()).unwrap());
        let crew = Crew::start_with(&engine, JOB_BYTES, 0).unwrap();
        Self { crew, source: Source::open(path).unwrap(), wide, _folder: folder }
    }

    fn begin(&self, range: std::ops::Range<usize>) -> (Arc<Task>, Region) {
        self.begin_at(7, range)
    }

    fn begin_at(&self, start: u64, range: std::ops::Range<usize>) -> (Arc<Task>, Region) {
        let memory = Buffer::zeroed(range.len() * JOB_BYTES * 2).unwrap().into_region();
        let (region, mut rest, mut jobs) = (memory.region(), memory, Vec::new());
        for index in range {
            let (target, behind) = rest.split_at(2 * JOB_BYTES);
            rest = behind;
            let conversion = Conversion {
                source: 0,
                offset: start + (index * JOB_BYTES) as u64,
                bytes: JOB_BYTES,
                at: 0,
                target_bytes: 2 * JOB_BYTES,
                arrival: Arrival::Cast { from: Float::Bf16, to: Float::F32 },
                trim: (0, 0),
                then: None,
            };
            jobs.push(Job { file: Arc::clone(self.source.file()), conversion, target });
        }
        (self.crew.begin(jobs, false), region)
    }

    fn assert_came(&self, task: &Task, region: &Region, first: usize) {
        let came = task.finish().unwrap();
        let (bytes, ..) = came.result.unwrap();
        assert_eq!(bytes as usize * 2, region.len());
        let mut memory = vec![0; region.len()];
        region.copy_to_slice(0, &mut memory);
        let at = first * JOB_BYTES * 2;
        assert!(memory == self.wide[at..at + memory.len()]);
    }

    /// On their way, without a buffer yet, buffers.
    fn counts(&self) -> (usize, usize, usize) {
        let jobs = lock(&self.crew.shared.jobs);
        (jobs.reading.len(), jobs.waiting.len(), jobs.reading.len() + jobs.spare.len() + jobs.unmade)
    }
}

#[test]
fn all_buffers_are_on_their_way_and_who_waits_converts() {
    let world = World::new(40);
    let buffers = world.crew.shared.buffers;
    assert!(world.crew.bound_bytes() <= BUFFERS_BYTES as u64 && buffers > 4);
    let (task, region) = world.begin(0..40);
    assert_eq!(world.counts(), (buffers, 40 - buffers, buffers));
    assert!(!task.is_done());
    assert!(world.crew.help(&task, Instant::now() + FAR));
    world.assert_came(&task, &region, 0);
    assert_eq!(world.counts(), (0, 0, buffers), "no buffer is lost");
}

#[test]
fn what_somebody_waits_for_comes_first() {
    let world = World::new(60);
    let (early, before) = world.begin(0..50);
    let (wanted, region) = world.begin(50..60);
    world.crew.hurry(&wanted);
    assert!(world.crew.help(&wanted, Instant::now() + FAR));
    world.assert_came(&wanted, &region, 50);
    assert!(!early.is_done(), "what nobody waits for was done first");
    assert!(world.crew.help(&early, Instant::now() + FAR));
    world.assert_came(&early, &before, 0);
}

#[test]
fn who_has_no_time_does_not_help() {
    let world = World::new(30);
    let (task, region) = world.begin(0..30);
    assert!(!world.crew.help(&task, Instant::now()));
    assert!(world.crew.help(&task, Instant::now() + FAR));
    world.assert_came(&task, &region, 0);
}

#[test]
fn several_wait_for_several() {
    let world = World::new(48);
    let tasks: Vec<_> = (0..4).map(|index| (index, world.begin(index * 12..(index + 1) * 12))).collect();
    std::thread::scope(|scope| {
        for (index, (task, region)) in &tasks {
            let world = &world;
            scope.spawn(move || {
                assert!(world.crew.help(task, Instant::now() + FAR));
                world.assert_came(task, region, index * 12);
            });
        }
    });
    let (reading, waiting, buffers) = world.counts();
    assert_eq!((reading, waiting, buffers), (0, 0, world.crew.shared.buffers));
}

#[test]
fn what_cannot_begin_to_be_read_is_over() {
    let world = World::new(1);
    // No file has such a place, so that no read of it begins; also of those for which there was no buffer at first.
    let (before, region) = world.begin(0..1);
    let (task, _) = world.begin_at(u64::MAX - (1 << 40), 0..60);
    assert!(world.crew.help(&task, Instant::now() + FAR));
    assert!(task.finish().unwrap().result.is_err());
    assert!(world.crew.help(&before, Instant::now() + FAR));
    world.assert_came(&before, &region, 0);
    assert_eq!(world.counts(), (0, 0, world.crew.shared.buffers), "no buffer is lost");
}

#[test]
fn who_waits_hears_of_what_others_could_not_begin() {
    let world = World::new(40);
    let (_, _region) = world.begin(0..40);
    let (task, _) = world.begin_at(u64::MAX - (1 << 40), 0..3);
    std::thread::scope(|scope| {
        let all = [1, 2].map(|_| scope.spawn(|| world.crew.help(&task, Instant::now() + FAR)));
        all.into_iter().for_each(|one| assert!(one.join().unwrap()));
    });
    assert!(task.finish().unwrap().result.is_err());
}
