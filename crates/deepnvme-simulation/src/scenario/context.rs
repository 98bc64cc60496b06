//! What all scenarios share: the machine of one execution, engines and processes on it, and the report of what went wrong.

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

/// How an execution ended.
#[derive(Clone, Debug)]
pub struct Report {
    /// What it was about.
    pub kind: Kind,
    /// Steps of the code under test.
    pub steps: u64,
    /// A number that tells whether two executions did the same.
    pub trace: u64,
    /// Moments at which a crash was tried, where it is tried at all of them.
    pub moments: u64,
    /// What was wrong.
    pub failures: Vec<String>,
}

/// The number of the machine that an execution is about.
pub const FIRST: WorldId = 0;
/// The number of a copy of it, which shows what a crash would leave.
pub const GLIMPSE: WorldId = 1;

/// One of so many seeds has each change of its machine judged.
const ONE_OF: u64 = 100;
/// Looks of one execution whose machines are kept: such a seed is executed again and again, each time with the next of them.
/// Few of them, for an execution becomes slower with every thread that it has had.
pub const BATCH: u64 = 8;

/// Whether the seed is one of those that have each change judged.
#[must_use]
pub fn is_every_change_judged(seed: u64) -> bool {
    Rng::keyed(seed, &[0x6576_6572]).below(ONE_OF) == 0
}

/// The machine in an instant, to be judged as a crash would leave it.
struct Glimpse {
    instant: Instant,
    /// Whether the crash is a power cut; both are tried where this does not say.
    is_cut: Option<bool>,
    examine: Examine,
}

/// Judges such a machine; the argument tells whether the power was cut.
type Examine = Box<dyn Fn(&Context, bool) + Send>;

/// The machine of one execution, and the list of what went wrong.
#[derive(Clone)]
pub struct Context {
    /// The machine.
    pub world: World,
    seed: u64,
    /// When that was, for a copy of the machine.
    when: String,
    /// Of all looks, those that this execution has. Nothing: a scenario has some where it wants to.
    every: Option<Range<u64>>,
    /// By their places.
    glimpses: Arc<Mutex<BTreeMap<usize, Glimpse>>>,
    /// Memory of the engines of a process.
    rooms: Arc<Mutex<Vec<Room>>>,
    report: Arc<Mutex<Report>>,
}

impl Context {
    /// A machine that the seed draws.
    ///
    /// # Panics
    /// When the kernel gives no memory.
    #[must_use]
    pub fn new(seed: u64, report: &Arc<Mutex<Report>>) -> Self {
        Self::with(seed, Setup::draw(&mut Rng::keyed(seed, &[0x0073_6574])), report)
    }

    /// A machine that is like this.
    ///
    /// # Panics
    /// When the kernel gives no memory.
    #[must_use]
    pub fn with(seed: u64, setup: Setup, report: &Arc<Mutex<Report>>) -> Self {
        let Ok(world) = World::new(seed, setup) else { panic!("no memory for a world") };
        let (when, every, glimpses) = (String::new(), None, Arc::default());
        Self { world, seed, when, every, glimpses, rooms: Arc::default(), report: Arc::clone(report) }
    }

    /// The same with looks before all changes of the machine, of which those of these numbers are judged.
    #[must_use]
    pub fn judging(mut self, numbers: Range<u64>) -> Self {
        self.every = Some(numbers);
        self
    }

    /// Has all calls of this execution go to its world.
    pub fn enter(&self) {
        simulated::enter(FIRST, Arc::new(self.world.clone()));
    }

    /// Random numbers for that purpose.
    #[must_use]
    pub fn rng(&self, purpose: u64) -> Rng {
        Rng::keyed(self.seed, &[0x7363_656e, purpose])
    }

    /// Notes what went wrong.
    #[allow(clippy::needless_pass_by_value, reason = "callers have made the text for this")]
    pub fn fail(&self, what: String) {
        let what = format!("{}{what}", self.when);
        ignore_poison(self.report.lock()).failures.push(what);
    }

    /// Has so many looks, now and then (`chance` of a thousand), at the machine as it would be after a crash, just before some
    /// of the changes that are made from now on; where all changes are judged, before each of them. `prepare` is called in
    /// that instant; what it returns is called when all is over, with a copy of the machine, and whether the crash was a power
    /// cut: twice where both are tried.
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

    /// Examines what was seen meanwhile.
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

    /// An engine of the calling process.
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

    /// Starts a process.
    pub fn process(&self, id: ProcessId, work: impl FnOnce(&Self) + Send + 'static) -> JoinHandle<()> {
        let context = Self { rooms: Arc::default(), ..self.clone() };
        thread::spawn(move || thread::in_process(id, || work(&context)))
    }

    /// Waits for these.
    pub fn join(&self, processes: Vec<JoinHandle<()>>) {
        for process in processes {
            if process.join().is_err() {
                self.fail("a thread panicked".into());
            }
        }
    }

    /// Waits for all processes; then the power is cut, if it is to be, and comes back. From now on nothing fails.
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

    /// Writes the report, and judges what was seen meanwhile: nothing of that changes what the execution was.
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
