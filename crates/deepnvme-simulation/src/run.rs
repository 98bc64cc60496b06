//! Run one seed: as one execution, or as several if every change is checked.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use deepnvme_io::fs::simulated;
use deepnvme_io::mem::mapped_bytes as memory;
use deepnvme_mem::sync::ignore_poison;
use deepnvme_simulation_runtime::{thread, time};
use shuttle::{Config, FailurePersistence, MaxSteps, Runner};

pub use crate::scenario::RunReport;
use crate::scenario::{self, CRASH_CHECKS_PER_RUN, CRASHED_WORLD, Context, MAIN_WORLD, ScenarioKind};
use crate::scheduler::SeededScheduler;
use crate::world::Setup;

/// Thread switches after which an execution counts as endless.
const SWITCHES_MAX: usize = 1_500_000;

/// Executes a seed. `only` fixes the scenario for every seed.
#[must_use]
pub fn run(seed: u64, only: Option<ScenarioKind>) -> RunReport {
    let kind = only.unwrap_or_else(|| scenario::draw(seed));
    let work = move |context: &Context| scenario::run(kind, context);
    if !scenario::checks_every_change(seed) {
        return execute(seed, kind, move |report| Context::new(seed, report), work);
    }
    // Machines of all moments at once would not fit in memory.
    let batch = |first: u64| {
        let machine =
            move |report: &_| Context::new(seed, report).checking_crashes_at(first..first + CRASH_CHECKS_PER_RUN);
        execute(seed, kind, machine, work)
    };
    let mut report = batch(0);
    let mut first = CRASH_CHECKS_PER_RUN;
    while first < report.crash_points && report.failures.is_empty() {
        let next = batch(first);
        if (next.trace, next.steps, next.crash_points) != (report.trace, report.steps, report.crash_points) {
            report.failures.push("two executions of the seed differ".into());
        }
        report.failures.extend(next.failures);
        first += CRASH_CHECKS_PER_RUN;
    }
    report
}

/// Executes `work` on a machine with this `setup`. The seed decides everything random.
#[must_use]
pub fn script(seed: u64, setup: &Setup, work: impl Fn(&Context) + Send + Sync + 'static) -> RunReport {
    let setup = setup.clone();
    execute(seed, ScenarioKind::Script, move |report| Context::with(seed, setup.clone(), report), work)
}

fn execute(
    seed: u64,
    kind: ScenarioKind,
    machine: impl Fn(&Arc<Mutex<RunReport>>) -> Context + Send + Sync + 'static,
    work: impl Fn(&Context) + Send + Sync + 'static,
) -> RunReport {
    let mut config = Config::new();
    config.stack_size = thread::STACK_BYTES;
    config.failure_persistence = FailurePersistence::None;
    config.max_steps = MaxSteps::FailAfter(SWITCHES_MAX);
    config.silence_warnings = true;
    let report = RunReport { kind, steps: 0, trace: 0, crash_points: 0, failures: Vec::new() };
    let shared = Arc::new(Mutex::new(report));
    let inner = Arc::clone(&shared);
    let execute = move || {
        time::reset();
        fastrand::seed(seed);
        let context = machine(&inner);
        context.enter();
        work(&context);
        context.finish();
    };
    memory::reset();
    let result = catch_unwind(AssertUnwindSafe(|| Runner::new(SeededScheduler::new(seed), config).run(execute)));
    simulated::leave(MAIN_WORLD);
    simulated::leave(CRASHED_WORLD);
    let held = memory::mapped_bytes();
    let mut report = ignore_poison(shared.lock()).clone();
    if let Err(panic) = result {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        report.failures.push(text.unwrap_or_else(|| "a panic without a text".into()));
    } else if held > 0 {
        report.failures.push(format!("{held} bytes of memory are still held"));
    }
    report
}
