//! State that all scenarios share: the execution's machine, its engines and processes, and the failure report.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use deepnvme_io::fs::simulated;
use deepnvme_io::{BackendFactory, Config, Engine, Result};
use deepnvme_mem::sync::ignore_poison;
use deepnvme_simulation_runtime::thread::{self, JoinHandle, ProcessId, WorldId};
use deepnvme_testkit::rng::Rng;

use super::kind::Kind;
use crate::backend::WorldBackend;
use crate::world::{Instant, Looks, Room, Setup, World};

/// Bounce memory of an engine.
pub(super) const POOL_BYTES: u64 = 64 << 10;

/// Result of an execution.
#[derive(Clone, Debug)]
pub struct Report {
    /// The scenario.
    pub kind: Kind,
    /// Steps of the code under test.
    pub steps: u64,
    /// Hash of all steps, equal for identical executions.
    pub trace: u64,
    /// Moments at which crashes were tried, if all are tried.
    pub moments: u64,
    /// Failures found.
    pub failures: Vec<String>,
}

/// Number of the machine under test.
pub const FIRST: WorldId = 0;
/// Number of a copy that shows the state after a crash.
pub const GLIMPSE: WorldId = 1;

/// One in this many seeds judges every change of its machine.
const ONE_OF: u64 = 100;
/// Snapshots that one execution keeps. Such a seed runs repeatedly, each time with the next batch. Batches are small
/// because executions slow down with every thread they have started.
pub const BATCH: u64 = 8;

/// Return whether a seed judges every change.
#[must_use]
pub fn is_every_change_judged(seed: u64) -> bool {
    Rng::keyed(seed, &[0x6576_6572]).below(ONE_OF) == 0
}

/// The machine at a moment, to be judged as after a crash.
struct Glimpse {
    instant: Instant,
    /// Whether the crash is a power cut; if `None`, both are tried.
    is_cut: Option<bool>,
    examine: Examine,
}

/// Judge such a machine. The argument says whether the power was cut.
type Examine = Box<dyn Fn(&Context, bool) + Send>;

/// The machine of one execution, and its failures.
#[derive(Clone)]
pub struct Context {
    /// The machine.
    pub world: World,
    seed: u64,
    /// For a copy of the machine, the moment it was taken.
    when: String,
    /// Numbers of the snapshots that this execution judges. If `None`, the scenario chooses.
    every: Option<Range<u64>>,
    /// By place.
    glimpses: Arc<Mutex<BTreeMap<usize, Glimpse>>>,
    /// Memory reserved for a process's engines.
    rooms: Arc<Mutex<Vec<Room>>>,
    report: Arc<Mutex<Report>>,
}

impl Context {
    /// Create a machine drawn from the seed.
    ///
    /// # Panics
    /// If the kernel provides no memory.
    #[must_use]
    pub fn new(seed: u64, report: &Arc<Mutex<Report>>) -> Self {
        Self::with(seed, Setup::draw(&mut Rng::keyed(seed, &[0x0073_6574])), report)
    }

    /// Create a machine with this setup.
    ///
    /// # Panics
    /// If the kernel provides no memory.
    #[must_use]
    pub fn with(seed: u64, setup: Setup, report: &Arc<Mutex<Report>>) -> Self {
        let Ok(world) = World::new(seed, setup) else { panic!("no memory for a world") };
        let (when, every, glimpses) = (String::new(), None, Arc::default());
        Self { world, seed, when, every, glimpses, rooms: Arc::default(), report: Arc::clone(report) }
    }

    /// Snapshot before every change of the machine, and judge those with these numbers.
    #[must_use]
    pub fn judging(mut self, numbers: Range<u64>) -> Self {
        self.every = Some(numbers);
        self
    }

    /// Route all calls of this execution to its world.
    pub fn enter(&self) {
        simulated::enter(FIRST, Arc::new(self.world.clone()));
    }

    /// Return random numbers for a purpose.
    #[must_use]
    pub fn rng(&self, purpose: u64) -> Rng {
        Rng::keyed(self.seed, &[0x7363_656e, purpose])
    }

    /// Record a failure.
    #[allow(clippy::needless_pass_by_value, reason = "callers have made the text for this")]
    pub fn fail(&self, what: String) {
        let what = format!("{}{what}", self.when);
        ignore_poison(self.report.lock()).failures.push(what);
    }

    /// Snapshot the machine as after a crash, just before some of the following changes: `looks` of them, in `chance`
    /// of a thousand executions. If every change is judged, snapshot before each. `prepare` runs at that moment. The
    /// closure that it returns runs at the end, with a copy of the machine and whether the power was cut; twice if both
    /// crashes are tried.
    pub fn watch<E>(&self, chance: u32, looks: usize, prepare: impl Fn() -> E + Send + 'static)
    where
        E: Fn(&Self, bool) + Send + 'static,
    {
        let looks = match &self.every {
            Some(numbers) => Looks::Every(numbers.clone()),
            None if self.rng(4).chance(chance) => Looks::Some(looks),
            None => return,
        };
        let is_every = self.every.is_some();
        let mut rng = self.rng(0x6c6f_6f6b);
        let glimpses = Arc::clone(&self.glimpses);
        self.world.watch(looks, self.rng(0x7761_7463), move |instant, place| {
            let is_cut = (!is_every).then(|| rng.chance(700));
            let glimpse = Glimpse { instant, is_cut, examine: Box::new(prepare()) };
            ignore_poison(glimpses.lock()).insert(place, glimpse);
        });
    }

    /// Judge the snapshots.
    fn examine_glimpses(&self) {
        let glimpses = std::mem::take(&mut *ignore_poison(self.glimpses.lock()));
        for Glimpse { instant, is_cut, examine } in glimpses.into_values() {
            for is_cut in is_cut.map_or(vec![false, true], |is_cut| vec![is_cut]) {
                let Ok(world) = instant.after_crash(is_cut) else {
                    self.fail("a crash itself failed".into());
                    continue;
                };
                self.examine(world, instant.step, is_cut, &examine);
            }
        }
    }

    fn examine(&self, world: World, step: u64, is_cut: bool, examine: &Examine) {
        let happened = if is_cut { "had the power failed" } else { "had all processes died" };
        let when = format!("{happened} at step {step}: ");
        let context = Self { world, when, ..self.clone() };
        simulated::enter(GLIMPSE, Arc::new(context.world.clone()));
        thread::in_world(GLIMPSE, || examine(&context, is_cut));
        for violation in context.world.violations() {
            context.fail(violation);
        }
        if context.world.lost_transfers() > 0 {
            context.fail("transfers never came home".into());
        }
        simulated::leave(GLIMPSE);
    }

    /// Create an engine for the calling process.
    ///
    /// # Errors
    /// None is expected.
    pub fn engine(&self, purpose: u64) -> Result<Arc<Engine>> {
        let mut rng = self.rng(purpose);
        let config = Config {
            workers: rng.within(1..3) as u32,
            queue_depth: rng.within(1..5) as u32,
            block_bytes: 4096,
            pool_bytes: Some(POOL_BYTES),
            lock_pool: false,
            register_pool: false,
            ..Config::default()
        };
        ignore_poison(self.rooms.lock()).push(self.world.room(POOL_BYTES));
        let world = self.world.clone();
        let seed = rng.next_u64();
        let factory: BackendFactory = Arc::new(move |setup| {
            let rng = Rng::keyed(seed, &[u64::from(setup.worker_index)]);
            Ok(Box::new(WorldBackend::new(&world, setup.queue_depth, rng)))
        });
        Engine::with_backends(config, factory).map(Arc::new)
    }

    /// Start a process.
    pub fn process(&self, id: ProcessId, work: impl FnOnce(&Self) + Send + 'static) -> JoinHandle<()> {
        let context = Self { rooms: Arc::default(), ..self.clone() };
        thread::spawn(move || thread::in_process(id, || work(&context)))
    }

    /// Wait for these processes.
    pub fn join(&self, processes: Vec<JoinHandle<()>>) {
        for process in processes {
            if process.join().is_err() {
                self.fail("a thread panicked".into());
            }
        }
    }

    /// Wait for all processes, then cut and restore the power if `is_cut`. Nothing fails from now on.
    pub fn finish_running(&self, running: Vec<JoinHandle<()>>, is_cut: bool) {
        self.join(running);
        let moments = self.world.unwatch();
        self.world.unbound_memory();
        ignore_poison(self.report.lock()).moments = moments;
        if is_cut {
            self.world.cut_power();
            if let Err(errno) = self.world.restart() {
                self.fail(format!("the crash itself failed: {errno}"));
            }
        }
        self.world.calm();
    }

    /// Write the report and judge the snapshots. Judging does not change the execution.
    pub fn finish(&self) {
        let mut violations = self.world.violations();
        match self.world.lost_transfers() {
            0 => {}
            lost => violations.push(format!("{lost} transfers never came home")),
        }
        let mut report = ignore_poison(self.report.lock());
        report.failures.extend(violations);
        report.steps = self.world.steps();
        report.trace = self.world.trace();
        drop(report);
        self.examine_glimpses();
    }
}
