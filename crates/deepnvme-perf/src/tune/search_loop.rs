//! The trials of a search: one folder, or several together.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use deepnvme_io::{Config, DirectMode};

use super::options::{TuneOptions, cpus, workload};
use super::result::{Choice, FolderResult, GpuRoute};
use super::search::{self, SearchResult};
use super::space::{self, SearchSpace};
use crate::error::{Error, Result};
use crate::measure::{Benchmark, Direction, Observer, Phase, ProgressUpdate, Runner};

/// Fraction of a folder's budget for choosing settings for both directions together.
const BOTH_SHARE: f64 = 0.15;
/// Rounds in which the finalists of both directions are compared, if the budget allows.
const BOTH_ROUNDS: usize = 3;
/// Finalists of each direction.
const BOTH_FINALISTS: usize = 4;

/// Searches the requested directions in these folders. Returns the result, and the settings that it chose from.
pub(super) fn search_folders(
    options: &TuneOptions,
    space: &SearchSpace,
    folders: Vec<PathBuf>,
    budget: Duration,
    observer: &mut dyn Observer,
) -> Result<(FolderResult, SearchSpace)> {
    let mut runner = Runner::prepare(workload(options, folders.clone()), observer)?;
    let prepared = Instant::now();
    let gds = options.gds.then(|| route(&runner));
    let space = match &gds {
        Some(gpu) if gpu.kind == "cufile" => {
            let given = options.space.clone().map(|space| SearchSpace { gds: DirectMode::Preferred, ..space });
            &given.unwrap_or_else(|| SearchSpace::of_cufile(cpus()))
        }
        _ => space,
    };
    let mut result = FolderResult { folders, gds, read: None, write: None, both: None };
    let start = starting_point(space);
    let share = 1.0 - if options.directions.len() > 1 { BOTH_SHARE } else { 0.0 };
    let each = budget.mul_f64(share / options.directions.len() as f64);
    let mut searches = Vec::new();
    for direction in &options.directions {
        let began = Instant::now();
        let spent = || began.elapsed().as_secs_f64() / each.as_secs_f64();
        let mut trials = Trials { runner: &mut runner, direction: *direction, spent: &spent, observer };
        let found = match search::search(space, &start, &spent, &mut |config| trials.measure(config)) {
            Err(Error::Interrupted) if !searches.is_empty() => break,
            found => found?,
        };
        let choice = Choice::of(&found, &start);
        match direction {
            Direction::Read => result.read = Some(choice),
            Direction::Write => result.write = Some(choice),
        }
        searches.push((*direction, found));
    }
    let is_over = || prepared.elapsed() >= budget;
    result.both = Some(choose_for_both(&searches, &start, &is_over, &mut |direction, config| {
        Trials { runner: &mut runner, direction, spent: &|| 1.0, observer }.measure(config)
    })?);
    Ok((result, space.clone()))
}

/// Returns the default settings, with the space's first backend and its use of cuFile.
fn starting_point(space: &SearchSpace) -> Config {
    // The first backend of a default space is Auto.
    let backend = space.backend.first().copied().unwrap_or_default();
    Config { backend, gds: space.gds, ..Config::default() }
}

/// Compares the finalists of both directions in turn. If the budget `is_over`, compares only the default and the choice
/// of each direction, once. The score is the product of their
/// speeds relative to the best of each direction. Of the settings that are as good as the best, chooses the default, or
/// else the smallest. After an interruption, keeps the choice of the first direction.
fn choose_for_both(
    searches: &[(Direction, SearchResult)],
    start: &Config,
    is_over: &dyn Fn() -> bool,
    trial: &mut dyn FnMut(Direction, &Config) -> Result<f64>,
) -> Result<Config> {
    if let [(_, found)] = searches {
        return Ok(found.best().config.clone());
    }
    let finalists_each = if is_over() { 0 } else { BOTH_FINALISTS };
    let mut candidates: Vec<Config> = Vec::new();
    let finalists = searches.iter().flat_map(|(_, found)| {
        let finalists = found.tried.iter().take(finalists_each).map(|candidate| &candidate.config);
        std::iter::once(&found.best().config).chain(finalists)
    });
    for config in std::iter::once(start).chain(finalists) {
        if !candidates.contains(config) {
            candidates.push(config.clone());
        }
    }
    let mut scores = vec![Vec::new(); candidates.len()];
    for round in 0..BOTH_ROUNDS {
        if round > 0 && is_over() {
            break;
        }
        for (direction, found) in searches {
            let best = found.tried[0].median();
            for turn in 0..candidates.len() {
                let index = if round % 2 == 0 { turn } else { candidates.len() - 1 - turn };
                match trial(*direction, &candidates[index]) {
                    Ok(speed) => scores[index].push(speed / best),
                    // The searches have ended: keep the first one's choice.
                    Err(Error::Interrupted) => return Ok(searches[0].1.best().config.clone()),
                    Err(error) => return Err(error),
                }
            }
        }
    }
    let product = |index: &usize| {
        let per_direction = (0..searches.len()).map(|direction| {
            let of_direction = scores[*index].iter().enumerate();
            // Each round adds one score per direction, in the order of the directions.
            let own: Vec<_> =
                of_direction.filter(|(at, _)| at % searches.len() == direction).map(|(_, s)| *s).collect();
            crate::bench::summary::median(&own)
        });
        per_direction.product::<f64>()
    };
    let products: Vec<_> = (0..candidates.len()).map(|index| product(&index)).collect();
    let best = products.iter().copied().fold(0.0, f64::max);
    // All that are indistinguishable from the best in each direction.
    let is_equal = |(product, _): &(&f64, &Config)| **product >= best * search::EQUAL * search::EQUAL;
    let equal: Vec<&Config> = products.iter().zip(&candidates).filter(is_equal).map(|(_, config)| config).collect();
    if equal.contains(&start) {
        return Ok(start.clone());
    }
    Ok(equal.into_iter().min_by_key(|config| space::cost(config)).unwrap_or(start).clone())
}

/// Trials of one direction.
struct Trials<'a> {
    runner: &'a mut Runner,
    direction: Direction,
    spent: &'a dyn Fn() -> f64,
    observer: &'a mut dyn Observer,
}

impl Trials<'_> {
    fn measure(&mut self, config: &Config) -> Result<f64> {
        if self.observer.is_interrupted() {
            return Err(Error::Interrupted);
        }
        let mut progress = BudgetProgress { direction: self.direction, spent: self.spent, observer: self.observer };
        self.runner.reconfigure(self.direction, config, &mut progress)?;
        Ok(self.runner.round(&mut progress)?.gb_per_s())
    }
}

/// Reports the used part of the budget instead of each trial's bytes.
struct BudgetProgress<'a> {
    direction: Direction,
    spent: &'a dyn Fn() -> f64,
    observer: &'a mut dyn Observer,
}

impl Observer for BudgetProgress<'_> {
    fn update(&mut self, update: &ProgressUpdate<'_>) {
        let label = match self.direction {
            Direction::Read => "read",
            Direction::Write => "write",
        };
        let (bytes_total, bytes_done) = (1000, ((self.spent)() * 1000.0).min(1000.0) as u64);
        self.observer.update(&ProgressUpdate { label, bytes_total, bytes_done, phase: Phase::Tuning, ..*update });
    }

    fn is_interrupted(&self) -> bool {
        self.observer.is_interrupted()
    }
}

/// Returns the route of the bytes that a runner has moved so far, which are those of laying out its files.
fn route(runner: &Runner) -> GpuRoute {
    let stats = runner.engine().stats();
    match stats.gds_reason {
        None if stats.bytes_gds > 0 => GpuRoute { kind: "cufile", reason: None },
        reason => {
            GpuRoute { kind: "bounce", reason: reason.or_else(|| Some("the trials are too small for cuFile".into())) }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use deepnvme_io::BackendChoice;

    use super::*;

    /// Searches one direction. Deeper queues are faster.
    fn searched(space: &SearchSpace, start: &Config) -> SearchResult {
        let spent = Cell::new(0.0);
        let trial = &mut |config: &Config| {
            spent.set(spent.get() + 0.001);
            Ok(f64::from(config.queue_depth))
        };
        search::search(space, start, &|| spent.get(), trial).unwrap()
    }

    #[test]
    fn after_the_budget_few_settings_are_compared_once() {
        let space = SearchSpace::of_machine(4, vec![BackendChoice::Uring, BackendChoice::Threads], false);
        let start = starting_point(&space);
        let searches = [Direction::Read, Direction::Write].map(|direction| (direction, searched(&space, &start)));
        let trials_until = |end: usize| {
            let trials = Cell::new(0);
            let trial = &mut |_, config: &Config| {
                trials.set(trials.get() + 1);
                Ok(f64::from(config.queue_depth))
            };
            let chosen = choose_for_both(&searches, &start, &|| trials.get() >= end, trial).unwrap();
            assert_eq!(chosen.queue_depth, searches[0].1.best().config.queue_depth);
            trials.get()
        };
        assert!(trials_until(0) <= 2 * 3, "the default and two choices, in two directions");
        let of_a_round = trials_until(1);
        assert!((2 * 4..=2 * (3 + 2 * BOTH_FINALISTS)).contains(&of_a_round));
        assert_eq!(trials_until(of_a_round + 1), 2 * of_a_round);
        assert_eq!(trials_until(usize::MAX), BOTH_ROUNDS * of_a_round);
    }
}
