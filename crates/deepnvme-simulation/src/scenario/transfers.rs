//! Several threads send requests to the engine, and cancel, prioritise, drop and fail them at any point. Each ends
//! once, its memory is returned, and no byte changes afterwards.

use std::ops::Range;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use deepnvme_file::{StripeSet, Target};
use deepnvme_io::fs::{self, OFlags};
use deepnvme_io::mem::{Region, RegionMut};
use deepnvme_io::{
    Access, DirectMode, Durability, Engine, Error, ErrorKind, OpenOptions, ReadItem, Result, TensorFile, Transfer,
    Transferred, WriteItem, WriteMode, WriteOptions,
};
use deepnvme_mem::sync::ignore_poison;
use deepnvme_simulation_runtime::thread;
use deepnvme_testkit::rng::Rng;

use super::area::Area;
use super::context::{Context, FILE_CHECK_ENGINE, POOL_BYTES};
use super::folders::make_folders;
use super::{first_file, payload, users};

const FILE: &str = "tensors.bin";
/// Areas in the file. Each belongs to one thread.
const AREAS: usize = 4;
/// One outcome is a power cut, one is a killed process, and the others are no crash.
const CRASH_OUTCOMES: u64 = 4;
/// Executions of a thousand that simulate crashes, and how many each of them simulates.
const CRASH_CHECK_PER_MILLE: u32 = 400;
const CRASH_CHECKS: usize = 2;

struct Scenario {
    target: Target,
    folders: Vec<PathBuf>,
    /// Start of each area. Borders may lie inside pages.
    starts: Vec<usize>,
    areas: Vec<Mutex<Area>>,
}

impl Scenario {
    fn area(&self, index: usize) -> MutexGuard<'_, Area> {
        ignore_poison(self.areas[index].lock())
    }

    fn copy(&self) -> Self {
        Self {
            target: self.target.clone(),
            folders: self.folders.clone(),
            starts: self.starts.clone(),
            areas: (0..self.areas.len()).map(|index| Mutex::new(self.area(index).clone())).collect(),
        }
    }

    fn open(&self, access: Access) -> Result<Arc<TensorFile>> {
        let target = match &self.target {
            Target::Stripes(set) => Target::from(set.manifest_path()),
            path => path.clone(),
        };
        deepnvme_file::open(&target, OpenOptions { access, create: false, direct: DirectMode::Preferred })
    }

    /// Opens the file through the caller's own descriptor in append mode.
    fn open_appending(&self) -> Result<Arc<TensorFile>> {
        let Target::Path(path) = &self.target else { return self.open(Access::ReadWrite) };
        let own = fs::open(path, OFlags::RDWR | OFlags::APPEND, 0);
        let own = own.map_err(|errno| Error::os("open", errno).at_path(path))?;
        TensorFile::from_fd(own.as_fd(), Some(path), Access::ReadWrite, DirectMode::Preferred)
    }
}

/// Runs the scenario.
pub(super) fn run(context: &Context) {
    let mut rng = context.rng(1);
    let folders = make_folders(context, rng.within(1..3) as usize);
    let scenario = Arc::new(make(&folders, &mut rng));
    for folder in &scenario.folders {
        users::create_user_file(context, &folder.join("tensors.bin.bak"));
    }
    let areas: Vec<_> = (0..AREAS).map(|index| scenario.area(index).certain().to_vec()).collect();
    first_file::write(context, &scenario.target, areas.concat());
    let processes = rng.within(1..3) as u32;
    let is_cut = context.draw_crash(&mut rng, processes, CRASH_OUTCOMES, 1..200, 1..150);
    let watched = Arc::clone(&scenario);
    context.check_crashes(CRASH_CHECK_PER_MILLE, CRASH_CHECKS, move || {
        let seen = watched.copy();
        move |context: &Context, is_cut| check(context, &seen, is_cut)
    });
    let running: Vec<_> = (1..=processes).map(|id| submitter(context, &scenario, id, processes)).collect();
    context.finish_running(running, is_cut);
    check(context, &scenario, is_cut);
    users::check_user_files(context);
}

fn make(folders: &[PathBuf], rng: &mut Rng) -> Scenario {
    let paths: Vec<PathBuf> = folders.iter().map(|folder| folder.join(FILE)).collect();
    let target = match StripeSet::new(paths.clone(), 4096) {
        Ok(set) if paths.len() > 1 => Target::Stripes(set),
        _ => Target::from(&paths[0]),
    };
    let (mut starts, mut areas, mut end) = (Vec::new(), Vec::new(), 0);
    for _ in 0..AREAS {
        let mut bytes = vec![0; rng.within(500..16_000) as usize];
        rng.fill(&mut bytes);
        starts.push(end);
        end += bytes.len();
        areas.push(Mutex::new(Area::new(bytes)));
    }
    Scenario { target, folders: folders.to_vec(), starts, areas }
}

/// Starts a process with one engine, and a thread for each of its areas.
fn submitter(context: &Context, scenario: &Arc<Scenario>, id: u32, processes: u32) -> thread::JoinHandle<()> {
    let scenario = Arc::clone(scenario);
    context.process(id, move |context| {
        let Ok(engine) = context.engine(u64::from(id)) else { return };
        let is_appending = context.rng(10 + u64::from(id)).chance(300);
        let file = if is_appending { scenario.open_appending() } else { scenario.open(Access::ReadWrite) };
        let Ok(file) = file else { return };
        let submitted_by_all = Mutex::new(0);
        thread::scope(|scope| {
            for area in (0..AREAS).filter(|area| area % processes as usize == id as usize - 1) {
                let (scenario, engine, file, submitted_by_all) = (&scenario, &engine, &file, &submitted_by_all);
                let started = thread::Builder::new().spawn_scoped(scope, move || {
                    let rng = context.rng(100 + area as u64);
                    let kept = Vec::new();
                    let mut submitter = Submitter {
                        context,
                        scenario,
                        engine,
                        file,
                        area,
                        rng,
                        submitted: 0,
                        has_dropped: false,
                        kept,
                    };
                    for _ in 0..submitter.rng.within(2..9) {
                        if !submitter.has_dropped {
                            submitter.request();
                        }
                    }
                    submitter.check_kept();
                    *ignore_poison(submitted_by_all.lock()) += submitter.submitted;
                });
                debug_assert!(started.is_ok(), "threads are never short");
            }
        });
        // Dropped requests end with the engine.
        engine.close();
        let (stats, submitted) = (engine.stats(), ignore_poison(submitted_by_all.into_inner()));
        if stats.requests != submitted {
            context.fail(format!("{} of {submitted} requests have ended", stats.requests));
        }
        if stats.pool_bytes > POOL_BYTES {
            context.fail(format!("the bounce pool has {} bytes, of {POOL_BYTES}", stats.pool_bytes));
        }
    })
}

struct Submitter<'a> {
    context: &'a Context,
    scenario: &'a Scenario,
    engine: &'a Arc<Engine>,
    file: &'a Arc<TensorFile>,
    area: usize,
    rng: Rng,
    submitted: u64,
    /// Whether a dropped request may be in flight.
    has_dropped: bool,
    /// Memory that requests have filled, and its contents at that time.
    kept: Vec<(RegionMut, Vec<u8>)>,
}

impl Submitter<'_> {
    fn request(&mut self) {
        match self.rng.below(8) {
            0 => self.sync(),
            1..4 => self.read(),
            _ => self.write(),
        }
    }

    /// Draws a range of the area.
    fn draw_range(&mut self) -> (usize, usize) {
        let len = self.scenario.area(self.area).len();
        let at = self.rng.below(len as u64) as usize;
        (at, 1 + self.rng.below((len - at) as u64) as usize)
    }

    fn offset(&self, at: usize) -> u64 {
        (self.scenario.starts[self.area] + at) as u64
    }

    fn sync(&mut self) {
        self.submitted += 1;
        match self.engine.sync(self.file, Durability::Data) {
            Ok(()) => self.scenario.area(self.area).sync(),
            Err(error) => self.report_failure(&error, false),
        }
    }

    fn write(&mut self) {
        let (at, len) = self.draw_range();
        let mut bytes = vec![0; len];
        self.rng.fill(&mut bytes);
        let durability = self.rng.pick(&[Durability::None, Durability::None, Durability::Data, Durability::Full]);
        let options = WriteOptions { durability, mode: WriteMode::InPlace };
        self.scenario.area(self.area).begin_write(at, &bytes);
        let pieces = self.draw_pieces(len);
        let item = |piece: Range<usize>| WriteItem {
            file: Arc::clone(self.file),
            offset: self.offset(at + piece.start),
            source: payload::region_with(&bytes[piece]).region(),
        };
        let items: Vec<WriteItem> = pieces.map(item).collect();
        let count = items.len();
        let Some(pending) = self.submit(|engine| engine.write_batch(items, options)) else { return };
        let Some((sources, result, was_cancelled)) = self.end(pending) else { return };
        if sources.is_none_or(|sources: Vec<Region>| sources.len() != count) {
            self.context.fail("memory of a write did not come back".into());
        }
        match result {
            Ok(transfer) if transfer.bytes == len as u64 => {
                let mut area = self.scenario.area(self.area);
                area.finish_write(at, &bytes);
                if durability != Durability::None {
                    area.sync();
                }
            }
            Ok(transfer) => self.context.fail(format!("a write of {len} bytes moved {}", transfer.bytes)),
            Err(error) => self.report_failure(&error, was_cancelled),
        }
    }

    /// Returns the range as one piece, or cut into two adjacent ones.
    fn draw_pieces(&mut self, len: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let middle = if len > 2 && self.rng.chance(400) { 1 + self.rng.below(len as u64 - 1) as usize } else { len };
        [0..middle, middle..len].into_iter().filter(|piece| !piece.is_empty())
    }

    fn read(&mut self) {
        let (at, len) = self.draw_range();
        let pieces = self.draw_pieces(len);
        let item = |piece: Range<usize>| ReadItem {
            file: Arc::clone(self.file),
            offset: self.offset(at + piece.start),
            target: payload::allocate(piece.len()),
        };
        let items: Vec<ReadItem> = pieces.map(item).collect();
        let count = items.len();
        let is_ahead = self.rng.chance(300);
        let submit_read =
            |engine: &Engine| if is_ahead { engine.read_batch_ahead(items) } else { engine.read_batch(items) };
        let Some(pending) = self.submit(submit_read) else { return };
        let Some((targets, result, was_cancelled)) = self.end(pending) else { return };
        let targets: Vec<RegionMut> = targets.unwrap_or_default();
        if targets.len() != count {
            self.context.fail("memory of a read did not come back".into());
        }
        let mut all = Vec::new();
        for target in targets {
            let bytes = bytes_of(&target);
            all.extend(&bytes);
            self.kept.push((target, bytes));
        }
        match result {
            Ok(_) => {
                if let Some(problem) = self.scenario.area(self.area).check_read(at, &all) {
                    self.context.fail(format!("a read of area {} at {at}: {problem}", self.area));
                }
            }
            Err(error) => self.report_failure(&error, was_cancelled),
        }
    }

    fn submit<T>(&mut self, make: impl FnOnce(&Engine) -> Result<Transfer<T>>) -> Option<Transfer<T>> {
        match make(self.engine) {
            Ok(pending) => {
                self.submitted += 1;
                Some(pending)
            }
            Err(error) => {
                self.report_failure(&error, false);
                None
            }
        }
    }

    /// Ends a request in one of many ways. Returns the memory, the result, and whether it was cancelled; `None` if it
    /// was dropped.
    fn end<T: deepnvme_io::TransferMemory>(
        &mut self,
        pending: Transfer<T>,
    ) -> Option<(Option<T>, Result<Transferred>, bool)> {
        let ending = self.rng.below(10);
        let mut was_cancelled = false;
        if ending < 4 {
            (0..self.rng.below(60)).for_each(|_| thread::yield_now());
            pending.prioritise();
            was_cancelled = pending.cancel();
            if ending == 0 {
                // A second time: nothing is left to cancel.
                if pending.cancel() && was_cancelled {
                    self.context.fail("a request was cancelled twice".into());
                }
            }
        } else if ending == 4 {
            // Another thread cancels it while this one waits.
            let rounds = self.rng.below(60);
            was_cancelled = thread::scope(|scope| {
                let pending = &pending;
                let canceller = thread::Builder::new().spawn_scoped(scope, move || {
                    (0..rounds).for_each(|_| thread::yield_now());
                    pending.cancel()
                });
                while !pending.wait_timeout(Duration::from_millis(1)) {}
                canceller.is_ok_and(|canceller| canceller.join().unwrap_or(false))
            });
        }
        if ending == 5 && self.rng.chance(300) {
            self.has_dropped = true;
            return None;
        }
        if ending == 5 {
            while !pending.wait_timeout(Duration::from_millis(1)) {}
            let first = pending.finish();
            let Some((memory, result)) = first else {
                self.context.fail("a request that is done has no result".into());
                return None;
            };
            if pending.finish().is_none_or(|(again, _)| again.is_some()) {
                self.context.fail("memory was returned twice".into());
            }
            return Some((memory, result, was_cancelled));
        }
        let (memory, result) = pending.wait();
        if result.as_ref().is_err_and(|error| error.kind() == ErrorKind::Cancelled) && !was_cancelled {
            self.context.fail("a request ended as cancelled, which nobody had cancelled".into());
        }
        Some((memory, result, was_cancelled))
    }

    fn report_failure(&self, error: &Error, was_cancelled: bool) {
        let is_excused = was_cancelled
            || self.context.world.is_dead(thread::process())
            || self.context.world.state().setup.failing_per_mille > 0;
        if !is_excused {
            self.context.fail(format!("a request failed, though nothing else did: {error}"));
        }
    }

    /// Checks that nothing writes to the memory of ended requests.
    fn check_kept(&self) {
        for (memory, then) in &self.kept {
            if bytes_of(memory) != *then {
                self.context.fail("memory changed after its request had ended".into());
            }
        }
    }
}

fn bytes_of(memory: &RegionMut) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.region().copy_to_slice(0, &mut bytes);
    bytes
}

/// Checks that all areas contain allowed bytes.
fn check(context: &Context, scenario: &Scenario, after_cut: bool) {
    let read = || -> Result<Vec<u8>> {
        let (engine, file) = (context.engine(FILE_CHECK_ENGINE)?, scenario.open(Access::Read)?);
        let (memory, result) = engine.read(&file, 0, payload::allocate(file.len()? as usize))?.wait();
        result?;
        Ok(memory.map(|memory: RegionMut| bytes_of(&memory)).unwrap_or_default())
    };
    let all = match read() {
        Ok(all) => all,
        Err(error) => return context.fail(format!("the file cannot be read: {error}")),
    };
    for (index, start) in scenario.starts.iter().enumerate() {
        let area = scenario.area(index);
        let problem = match all.get(*start..start + area.len()) {
            Some(bytes) => area.check_all(bytes, after_cut),
            None => Some(format!("the file has only {} bytes", all.len())),
        };
        if let Some(problem) = problem {
            context.fail(format!("area {index}: {problem}"));
        }
    }
}
