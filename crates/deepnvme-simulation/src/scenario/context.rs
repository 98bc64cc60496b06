//! State that all scenarios share: the execution's machine, its engines and processes, and the failure report.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use deepnvme_io::fs::simulated;
use deepnvme_io::{BackendFactory, Config, Engine, Result};
use deepnvme_mem::sync::ignore_poison;
use deepnvme_simulation_runtime::thread::{self, JoinHandle, ProcessId, WorldId};
use deepnvme_testkit::rng::Rng;
use deepnvme_testkit::scheduled_backend::ScheduledBackend;

use super::kind::ScenarioKind;
use crate::device::WorldDevice;
use crate::world::{CrashPoints, MachineSnapshot, MemoryAllowance, Setup, World};

/// Bounce memory of an engine.
pub(super) const POOL_BYTES: u64 = 64 << 10;

// Processes and engines of a scenario count from 1. Those below come before or after its run.
/// The process that creates the initial files.
pub(super) const SETUP_PROCESS: ProcessId = 400;
/// The engine of [`SETUP_PROCESS`].
pub(super) const SETUP_ENGINE: u64 = 99;
/// The process of saves that do not finish, or may fail.
pub(super) const UNFINISHED_SAVE_PROCESS: ProcessId = 499;
/// The engine of [`UNFINISHED_SAVE_PROCESS`].
pub(super) const UNFINISHED_SAVE_ENGINE: u64 = 95;
/// The process that saves once more at the end, without faults.
pub(super) const LAST_SAVE_PROCESS: ProcessId = 500;
/// The engine of [`LAST_SAVE_PROCESS`].
pub(super) const LAST_SAVE_ENGINE: u64 = 96;
/// The engine that reads files to check them.
pub(super) const FILE_CHECK_ENGINE: u64 = 97;
/// The engine that reads checkpoints and packed models to check them.
pub(super) const CHECKPOINT_CHECK_ENGINE: u64 = 94;

/// Result of an execution.
#[derive(Clone, Debug)]
pub struct RunReport {
    /// The scenario.
    pub kind: ScenarioKind,
    /// Steps of the code under test.
    pub steps: u64,
    /// Hash of all steps, equal for identical executions.
    pub trace: u64,
    /// Crash points that were tried, if all are tried.
    pub crash_points: u64,
    /// Failures found.
    pub failures: Vec<String>,
}

/// Number of the machine under test.
pub const MAIN_WORLD: WorldId = 0;
/// Number of a copy that shows the state after a crash.
pub const CRASHED_WORLD: WorldId = 1;

/// One in this many seeds checks every change of its machine.
const ONE_SEED_IN: u64 = 100;
/// The key of the random numbers that choose such seeds.
const EVERY_CHANGE_KEY: u64 = 0x6576_6572;
/// Snapshots that one execution keeps. A seed that checks every change runs repeatedly, each time with the next batch.
/// Batches are small because executions slow down with every thread they have started.
pub const CRASH_CHECKS_PER_RUN: u64 = 8;
/// The key of the random numbers of a setup.
const SETUP_KEY: u64 = 0x0073_6574;
/// The key of the random numbers of a scenario.
const SCENARIO_KEY: u64 = 0x7363_656e;

/// Returns whether a seed checks every change.
#[must_use]
pub fn checks_every_change(seed: u64) -> bool {
    Rng::keyed(seed, &[EVERY_CHANGE_KEY]).below(ONE_SEED_IN) == 0
}

/// The machine at a moment, to be checked as after a crash.
struct CrashCheck {
    machine: MachineSnapshot,
    /// Whether the crash is a power cut; if `None`, both are tried.
    is_cut: Option<bool>,
    check: Check,
}

/// Check such a machine. The argument says whether the power was cut.
type Check = Box<dyn Fn(&Context, bool) + Send>;

/// The machine of one execution, and its failures.
#[derive(Clone)]
pub struct Context {
    /// The machine.
    pub world: World,
    seed: u64,
    /// For a copy of the machine, the moment it was taken.
    when: String,
    /// Numbers of the snapshots that this execution checks. If `None`, the scenario chooses.
    crash_points: Option<Range<u64>>,
    /// By slot.
    crash_checks: Arc<Mutex<BTreeMap<usize, CrashCheck>>>,
    /// Memory reserved for a process's engines.
    allowances: Arc<Mutex<Vec<MemoryAllowance>>>,
    report: Arc<Mutex<RunReport>>,
}

impl Context {
    /// Creates a machine drawn from the seed.
    ///
    /// # Panics
    /// If the kernel provides no memory.
    #[must_use]
    pub fn new(seed: u64, report: &Arc<Mutex<RunReport>>) -> Self {
        Self::with(seed, Setup::draw(&mut Rng::keyed(seed, &[SETUP_KEY])), report)
    }

    /// Creates a machine with this setup.
    ///
    /// # Panics
    /// If the kernel provides no memory.
    #[must_use]
    pub fn with(seed: u64, setup: Setup, report: &Arc<Mutex<RunReport>>) -> Self {
        let Ok(world) = World::new(seed, setup) else { panic!("no memory for a world") };
        let (when, crash_points, crash_checks) = (String::new(), None, Arc::default());
        Self { world, seed, when, crash_points, crash_checks, allowances: Arc::default(), report: Arc::clone(report) }
    }

    /// Snapshots before every change of the machine, and checks those with these numbers.
    #[must_use]
    pub fn checking_crashes_at(mut self, numbers: Range<u64>) -> Self {
        self.crash_points = Some(numbers);
        self
    }

    /// Routes all calls of this execution to its world.
    pub fn enter(&self) {
        simulated::enter(MAIN_WORLD, Arc::new(self.world.clone()));
    }

    /// Returns random numbers for a purpose: any number that the scenario uses once.
    #[must_use]
    pub fn rng(&self, purpose: u64) -> Rng {
        Rng::keyed(self.seed, &[SCENARIO_KEY, purpose])
    }

    /// Records a failure.
    #[allow(clippy::needless_pass_by_value, reason = "callers have made the text for this")]
    pub fn fail(&self, text: String) {
        let text = format!("{}{text}", self.when);
        ignore_poison(self.report.lock()).failures.push(text);
    }

    /// Draws one of `outcomes`: a power cut or a killed process after some steps, or in all others neither. Returns
    /// whether it is a power cut.
    pub fn draw_crash(
        &self,
        rng: &mut Rng,
        processes: u32,
        outcomes: u64,
        power_cut_steps: Range<u64>,
        kill_steps: Range<u64>,
    ) -> bool {
        let mut state = self.world.state();
        match rng.below(outcomes) {
            0 => state.setup.power_cut_at = Some(rng.within(power_cut_steps)),
            1 => state.setup.killed = Some((1 + rng.below(processes.into()) as u32, rng.within(kill_steps))),
            _ => {}
        }
        state.setup.power_cut_at.is_some()
    }

    /// Snapshots the machine as after a crash, just before some of the following changes: `count` of them, in `chance`
    /// of a thousand executions. If every change is checked, it snapshots before each. `prepare` runs at that moment.
    /// The closure that it returns runs at the end, with a copy of the machine and whether the power was cut; twice if
    /// both crashes are tried.
    pub fn check_crashes<E>(&self, chance: u32, count: usize, prepare: impl Fn() -> E + Send + 'static)
    where
        E: Fn(&Self, bool) + Send + 'static,
    {
        let points = match &self.crash_points {
            Some(numbers) => CrashPoints::All(numbers.clone()),
            None if self.rng(4).chance(chance) => CrashPoints::Sampled(count),
            None => return,
        };
        let is_every = self.crash_points.is_some();
        let mut rng = self.rng(0x6c6f_6f6b);
        let crash_checks = Arc::clone(&self.crash_checks);
        self.world.pick_crash_points(points, self.rng(0x7761_7463), move |machine, slot| {
            let is_cut = (!is_every).then(|| rng.chance(700));
            let crash_check = CrashCheck { machine, is_cut, check: Box::new(prepare()) };
            ignore_poison(crash_checks.lock()).insert(slot, crash_check);
        });
    }

    /// Checks the snapshots.
    fn run_crash_checks(&self) {
        let crash_checks = std::mem::take(&mut *ignore_poison(self.crash_checks.lock()));
        for CrashCheck { machine, is_cut, check } in crash_checks.into_values() {
            for is_cut in is_cut.map_or(vec![false, true], |is_cut| vec![is_cut]) {
                let Ok(world) = machine.after_crash(is_cut) else {
                    self.fail("a crash itself failed".into());
                    continue;
                };
                self.run_crash_check(world, machine.step, is_cut, &check);
            }
        }
    }

    fn run_crash_check(&self, world: World, step: u64, is_cut: bool, check: &Check) {
        let happened = if is_cut { "had the power failed" } else { "had all processes died" };
        let when = format!("{happened} at step {step}: ");
        let context = Self { world, when, ..self.clone() };
        simulated::enter(CRASHED_WORLD, Arc::new(context.world.clone()));
        thread::in_world(CRASHED_WORLD, || check(&context, is_cut));
        for violation in context.world.violations() {
            context.fail(violation);
        }
        if context.world.incomplete_transfers() > 0 {
            context.fail("transfers never completed".into());
        }
        simulated::leave(CRASHED_WORLD);
    }

    /// Creates an engine for the calling process.
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
        ignore_poison(self.allowances.lock()).push(self.world.allow_memory(POOL_BYTES));
        let world = self.world.clone();
        let seed = rng.next_u64();
        let factory: BackendFactory = Arc::new(move |setup| {
            let rng = Rng::keyed(seed, &[u64::from(setup.worker_index)]);
            Ok(Box::new(ScheduledBackend::new(WorldDevice(world.clone()), setup.queue_depth, rng)))
        });
        Engine::with_backends(config, factory).map(Arc::new)
    }

    /// Starts a process.
    pub fn process(&self, id: ProcessId, work: impl FnOnce(&Self) + Send + 'static) -> JoinHandle<()> {
        let context = Self { allowances: Arc::default(), ..self.clone() };
        thread::spawn(move || thread::in_process(id, || work(&context)))
    }

    /// Waits for these processes.
    pub fn join(&self, processes: Vec<JoinHandle<()>>) {
        for process in processes {
            if process.join().is_err() {
                self.fail("a thread panicked".into());
            }
        }
    }

    /// Waits for all processes, then cuts and restores the power if `is_cut`. Nothing fails from now on.
    pub fn finish_running(&self, running: Vec<JoinHandle<()>>, is_cut: bool) {
        self.join(running);
        let seen = self.world.stop_picking();
        self.world.unbound_memory();
        ignore_poison(self.report.lock()).crash_points = seen;
        if is_cut {
            self.world.cut_power();
            if let Err(errno) = self.world.restart() {
                self.fail(format!("the crash itself failed: {errno}"));
            }
        }
        self.world.stop_faults();
    }

    /// Writes the report and checks the snapshots. Checking does not change the execution.
    pub fn finish(&self) {
        let mut violations = self.world.violations();
        match self.world.incomplete_transfers() {
            0 => {}
            lost => violations.push(format!("{lost} transfers never completed")),
        }
        let mut report = ignore_poison(self.report.lock());
        report.failures.extend(violations);
        report.steps = self.world.steps();
        report.trace = self.world.trace();
        drop(report);
        self.run_crash_checks();
    }
}
