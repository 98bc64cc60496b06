//! Run a thousand seeds, each an execution of the storage layer in a simulated world, and check that they find bugs.
#![cfg(simulated)]
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "these are tests")]

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use deepnvme_simulation::run::{RunReport, run};
use deepnvme_simulation::scenario::{ScenarioKind, checks_every_change, draw};

const SEEDS: u64 = 1000;

/// Returns the reports of these seeds for which `wanted` holds.
fn reports(seeds: u64, only: Option<ScenarioKind>, wanted: fn(&RunReport) -> bool) -> Vec<(u64, RunReport)> {
    let (next, found) = (AtomicU64::new(0), Mutex::new(Vec::new()));
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds {
                        return;
                    }
                    let report = run(seed, only);
                    if wanted(&report) {
                        found.lock().unwrap().push((seed, report));
                    }
                }
            });
        }
    });
    found.into_inner().unwrap()
}

#[test]
fn a_thousand_seeds() {
    let failed = reports(SEEDS, None, |report| !report.failures.is_empty());
    if let Some((seed, report)) = failed.first() {
        let count = failed.len();
        panic!(
            "{count} of {SEEDS} seeds failed; seed {seed} ({}): {:#?}\nreplay: make simulate FIRST_SEED={seed} SEEDS=1 TELL=1",
            report.kind.name(),
            report.failures
        );
    }
}

#[test]
fn every_scenario_is_drawn_and_does_something() {
    for kind in ScenarioKind::ALL {
        let found = reports(20, Some(kind), |report| report.steps > 20);
        assert!(found.len() >= 15, "{}: only {} of 20 seeds do anything", kind.name(), found.len());
    }
    let drawn = reports(100, None, |_| true);
    assert!(ScenarioKind::ALL.iter().all(|kind| drawn.iter().any(|(_, report)| report.kind == *kind)));
}

#[test]
fn the_same_seed_is_the_same_execution() {
    let all = |report: &RunReport| (report.trace, report.steps, report.failures.clone());
    for kind in ScenarioKind::ALL.into_iter().chain(ScenarioKind::NAMED).chain([ScenarioKind::Overclaiming]) {
        let first = reports(20, Some(kind), |_| true);
        let traces: std::collections::BTreeSet<u64> = first.iter().map(|(_, report)| report.trace).collect();
        assert!(traces.len() > 15, "{}: seeds hardly matter", kind.name());
        for (seed, report) in first {
            let again = run(seed, Some(kind));
            assert_eq!(all(&again), all(&report), "seed {seed} ({})", kind.name());
            // The replay command of a failed seed also works if seeds draw their scenarios.
            assert!(draw(seed) != kind || all(&run(seed, None)) == all(&report), "seed {seed} ({})", kind.name());
        }
    }
}

#[test]
fn gathered_rows_are_those_of_the_file() {
    let failed = reports(400, Some(ScenarioKind::Rows), |report| !report.failures.is_empty());
    if let Some((seed, report)) = failed.first() {
        panic!("{} of 400 seeds failed, such as {seed}: {:?}", failed.len(), report.failures);
    }
}

#[test]
fn a_conversion_replaces_a_file_or_leaves_it() {
    let failed = reports(300, Some(ScenarioKind::Conversions), |report| !report.failures.is_empty());
    if let Some((seed, report)) = failed.first() {
        panic!("{} of 300 seeds failed, such as {seed}: {:?}", failed.len(), report.failures);
    }
}

#[test]
fn an_overclaiming_saver_is_caught() {
    let caught = reports(200, Some(ScenarioKind::Overclaiming), |report| !report.failures.is_empty());
    assert!(caught.len() >= 5, "{} of 200 seeds", caught.len());
}

#[test]
fn an_overclaiming_saver_is_caught_wherever_every_change_is_checked() {
    let checked: Vec<RunReport> = (0..4000)
        .filter(|seed| checks_every_change(*seed))
        .map(|seed| run(seed, Some(ScenarioKind::Overclaiming)))
        .collect();
    let crash_points: u64 = checked.iter().map(|report| report.crash_points).sum();
    assert!(
        checked.len() > 20 && crash_points > 20 * checked.len() as u64,
        "{crash_points} crash points of {} seeds",
        checked.len()
    );
    // Some savers never get to claim anything.
    let caught = checked.iter().filter(|report| !report.failures.is_empty()).count();
    assert!(caught * 4 > checked.len() * 3, "{caught} of {}", checked.len());
    let is_of_a_kill = |failure: &String| failure.starts_with("had all processes died");
    assert!(!checked.iter().flat_map(|report| &report.failures).any(is_of_a_kill), "only a power cut shows it");
}
