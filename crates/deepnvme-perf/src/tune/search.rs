//! The search: successive halving, then hill climbing from the best. The caller makes the trials, so this module does
//! no I/O.
//!
//! Single trials are noisy on a shared disk, so no candidate is dropped for one. A rung tries all remaining candidates
//! once, forwards and backwards in turn, and keeps the better half by the median of all their trials. The search then
//! climbs from the best candidates to better neighbours. The finalists are compared round by round.

use deepnvme_io::Config;

use super::space::{SearchSpace, cost};
use crate::bench::summary::median;
use crate::error::{Error, Result};

/// Candidates that remain after halving.
const FINALISTS: usize = 4;
/// Fewest trials of each finalist, if the budget allows; more rarely change the choice.
const FINAL_TRIALS: usize = 5;
/// Maximum trials of each finalist; after them the search ends before its budget.
const FINAL_TRIALS_MAX: usize = 12;
/// Candidates whose median reaches this fraction of the best are equal to it.
pub(super) const EQUAL: f64 = 0.98;
/// Fraction of the budget for the first bracket.
const FIRST_SHARE: f64 = 0.4;
/// Fraction of the budget after which climbing stops; the rest is for the final.
const CLIMB_SHARE: f64 = 0.85;

/// The index of the settings that the search starts from.
const START: usize = 0;

/// Settings, and the speeds of their trials.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The settings.
    pub config: Config,
    /// The speed of each trial in GB/s.
    pub gb_per_s: Vec<f64>,
}

impl Candidate {
    fn new(config: Config) -> Self {
        Self { config, gb_per_s: Vec::new() }
    }

    /// Returns the median of its trials; 0 without any.
    #[must_use]
    pub fn median(&self) -> f64 {
        median(&self.gb_per_s)
    }
}

/// The result of a search.
#[derive(Clone, Debug)]
pub struct SearchResult {
    /// All candidates that were tried, the best first.
    pub tried: Vec<Candidate>,
    /// The index of the chosen one.
    pub chosen: usize,
    /// Whether the chosen one is the settings that the search started from.
    pub is_start: bool,
    /// Candidates that are indistinguishable from the best, including it.
    pub equal: usize,
    /// Whether the search was interrupted.
    pub is_interrupted: bool,
}

impl SearchResult {
    /// Returns the chosen candidate.
    #[must_use]
    pub fn best(&self) -> &Candidate {
        &self.tried[self.chosen]
    }

    /// Returns how certain the choice is, in a sentence.
    #[must_use]
    pub fn confidence(&self) -> String {
        let (tried, best) = (self.tried.len(), self.tried[0].median());
        let short = if self.is_interrupted { "; stopped early" } else { "" };
        let gap = (1.0 - self.best().median() / best.max(f64::MIN_POSITIVE)) * 100.0;
        let near = if gap < 0.05 { "the best".to_owned() } else { format!("within {:.1}% of the best", gap.max(0.1)) };
        let reason = if self.is_start { "the default was kept" } else { "the smallest was chosen" };
        match self.equal {
            1 => format!("{near} of the finalists, {tried} tried{short}"),
            equal => {
                format!("{near} of the finalists, {tried} tried, {equal} candidates indistinguishable; {reason}{short}")
            }
        }
    }
}

/// Searches the space. `spent` returns the used fraction of the budget, 1 or more at its end; `trial` measures once, in
/// GB/s.
///
/// # Errors
/// The error of a trial. After an interruption, the result is the best so far if there is one.
pub fn search(
    space: &SearchSpace,
    start: &Config,
    spent: &dyn Fn() -> f64,
    trial: &mut dyn FnMut(&Config) -> Result<f64>,
) -> Result<SearchResult> {
    let mut tried: Vec<Candidate> = Vec::new();
    let outcome = brackets(space, start, spent, trial, &mut tried);
    let is_interrupted = matches!(outcome, Err(Error::Interrupted));
    if !is_interrupted || tried.iter().all(|candidate| candidate.gb_per_s.is_empty()) {
        outcome?;
    }
    Ok(choose(tried, start, is_interrupted))
}

fn brackets(
    space: &SearchSpace,
    start: &Config,
    spent: &dyn Fn() -> f64,
    trial: &mut dyn FnMut(&Config) -> Result<f64>,
    tried: &mut Vec<Candidate>,
) -> Result<()> {
    // The default settings always take part: otherwise the choice could be worse than they are.
    let mut population = vec![index_of(tried, start)];
    debug_assert_eq!(population, [START]);
    let first = std::cell::Cell::new(None);
    for config in space.sample(usize::MAX) {
        // As many as can be tried once in a third of the bracket's budget: the rungs need the rest.
        if spent() > FIRST_SHARE / 3.0 && population.len() > FINALISTS {
            break;
        }
        let index = index_of(tried, &config);
        if !population.contains(&index) {
            population.push(index);
        }
        if first.replace(Some(())).is_none() {
            measure(tried, population[0], trial)?;
        }
        if tried[index].gb_per_s.is_empty() {
            measure(tried, index, trial)?;
        }
    }
    let finalists = halve(population, FIRST_SHARE, spent, trial, tried)?;
    let mut finalists = climb(space, finalists, spent, trial, tried)?;
    // The default settings are in the final: if they are as good, they stay.
    if !finalists.contains(&START) {
        finalists.push(START);
    }
    for round in 0..FINAL_TRIALS_MAX {
        if round >= 1 && spent() >= 1.0 || round >= FINAL_TRIALS && is_clear(&finalists, tried) {
            break;
        }
        rung(&finalists, round, &|| false, trial, tried)?;
    }
    Ok(())
}

/// Climbs from the best candidates to better neighbours, until there are none or its share of the budget is used.
fn climb(
    space: &SearchSpace,
    mut finalists: Vec<usize>,
    spent: &dyn Fn() -> f64,
    trial: &mut dyn FnMut(&Config) -> Result<f64>,
    tried: &mut Vec<Candidate>,
) -> Result<Vec<usize>> {
    let mut seen: Vec<usize> = Vec::new();
    while spent() < CLIMB_SHARE {
        let neighbours: Vec<_> =
            finalists.iter().take(2).flat_map(|index| space.neighbours(&tried[*index].config)).collect();
        let mut population = finalists.clone();
        for config in neighbours {
            let index = index_of(tried, &config);
            if !population.contains(&index) && !seen.contains(&index) {
                population.push(index);
                seen.push(index);
            }
        }
        if population.len() == finalists.len() {
            break;
        }
        finalists = halve(population, CLIMB_SHARE, spent, trial, tried)?;
    }
    Ok(finalists)
}

/// Halves the population until only finalists remain. After `share` of the budget, halves without further trials:
/// candidates without any are dropped first.
fn halve(
    mut population: Vec<usize>,
    share: f64,
    spent: &dyn Fn() -> f64,
    trial: &mut dyn FnMut(&Config) -> Result<f64>,
    tried: &mut [Candidate],
) -> Result<Vec<usize>> {
    let mut round = 0;
    while population.len() > FINALISTS {
        rung(&population, round, &|| spent() >= share, trial, tried)?;
        population.sort_by(|left, right| tried[*right].median().total_cmp(&tried[*left].median()));
        population.truncate(population.len().div_ceil(2).max(FINALISTS));
        round += 1;
    }
    population.sort_by(|left, right| tried[*right].median().total_cmp(&tried[*left].median()));
    Ok(population)
}

/// Tries every candidate once, forwards or backwards, until the rung `is_over`.
fn rung(
    population: &[usize],
    round: usize,
    is_over: &dyn Fn() -> bool,
    trial: &mut dyn FnMut(&Config) -> Result<f64>,
    tried: &mut [Candidate],
) -> Result<()> {
    let order: Vec<_> =
        if round.is_multiple_of(2) { population.to_vec() } else { population.iter().rev().copied().collect() };
    order.into_iter().take_while(|_| !is_over()).try_for_each(|index| measure(tried, index, trial))
}

fn measure(tried: &mut [Candidate], index: usize, trial: &mut dyn FnMut(&Config) -> Result<f64>) -> Result<()> {
    let speed = trial(&tried[index].config)?;
    tried[index].gb_per_s.push(speed);
    Ok(())
}

fn index_of(tried: &mut Vec<Candidate>, config: &Config) -> usize {
    tried.iter().position(|candidate| candidate.config == *config).unwrap_or_else(|| {
        tried.push(Candidate::new(config.clone()));
        tried.len() - 1
    })
}

/// Returns whether the best finalist is clearly better than the second.
fn is_clear(finalists: &[usize], tried: &[Candidate]) -> bool {
    let mut medians: Vec<_> = finalists.iter().map(|index| tried[*index].median()).collect();
    medians.sort_by(|left, right| right.total_cmp(left));
    medians.len() < 2 || medians[1] < medians[0] * EQUAL
}

/// Chooses among the candidates that equal the best: the settings that the search started from, or else the smallest.
fn choose(mut tried: Vec<Candidate>, start: &Config, is_interrupted: bool) -> SearchResult {
    tried.retain(|candidate| !candidate.gb_per_s.is_empty());
    // One lucky trial does not win: candidates with few trials sort after the others.
    let most = tried.iter().map(|candidate| candidate.gb_per_s.len()).max().unwrap_or(1);
    let is_proven = |candidate: &Candidate| candidate.gb_per_s.len() >= most.min(FINAL_TRIALS);
    tried.sort_by(|left, right| is_proven(right).cmp(&is_proven(left)).then(right.median().total_cmp(&left.median())));
    let best = tried[0].median();
    let is_equal = |candidate: &&Candidate| is_proven(candidate) && candidate.median() >= best * EQUAL;
    let equal = tried.iter().take_while(is_equal).count().max(1);
    let kept = tried[..equal].iter().position(|candidate| candidate.config == *start);
    let smallest = || (0..equal).min_by_key(|index| cost(&tried[*index].config));
    let chosen = kept.or_else(smallest).unwrap_or(0);
    SearchResult { tried, chosen, is_start: kept.is_some(), equal, is_interrupted }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use deepnvme_io::BackendChoice;

    use super::*;

    fn space() -> SearchSpace {
        SearchSpace::of_machine(4, vec![BackendChoice::Uring, BackendChoice::Aio, BackendChoice::Threads], false)
    }

    /// The true speed of a simulated disk. It is fastest with 64 MiB in flight, two workers and io_uring. Too few bytes
    /// in flight cost more than too many.
    fn true_speed(config: &Config) -> f64 {
        use deepnvme_io::{SubmitMode, WindowMode};
        let in_flight = (u64::from(config.workers) * u64::from(config.queue_depth) * config.block_bytes) as f64;
        let doublings = (in_flight / f64::from(64 << 20)).log2();
        let depth = 1.0 - if doublings < 0.0 { 0.06 } else { 0.02 } * doublings.abs();
        let workers = 1.0 - 0.05 * (f64::from(config.workers) / 2.0).log2().abs();
        let backend = if config.backend == BackendChoice::Uring { 1.0 } else { 0.93 };
        let window = if config.window == WindowMode::Drain { 0.85 } else { 1.0 };
        let submit = if config.submit == SubmitMode::Single { 0.97 } else { 1.0 };
        6.0 * depth.max(0.2) * workers * backend * window * submit
    }

    /// Searches with `trials` noisy trials. Returns the choice's true speed relative to the best of the space.
    fn quality(seed: u64, trials: u32, noise: f64) -> (f64, SearchResult) {
        let (mut rng, done) = (fastrand::Rng::with_seed(seed), Cell::new(0));
        let space = space();
        let mut trial = |config: &Config| {
            done.set(done.get() + 1);
            // Noise mostly slows trials down.
            Ok(true_speed(config) * (1.0 - noise * rng.f64() * rng.f64() * 2.0))
        };
        let spent = || f64::from(done.get()) / f64::from(trials);
        let found = search(&space, &Config::default(), &spent, &mut trial).unwrap();
        let best = space.all().map(|config| true_speed(&config)).fold(0.0, f64::max);
        (true_speed(&found.best().config) / best, found)
    }

    #[test]
    fn trials_of_a_fifth_of_the_grid_find_a_good_choice_under_noise() {
        let grid = space().len() as u32;
        let qualities: Vec<_> = (0..40).map(|seed| quality(seed, grid / 5, 0.15).0).collect();
        let good = qualities.iter().filter(|quality| **quality >= 0.97).count();
        assert!(good >= 34, "{good} of 40: {qualities:?}");
        assert!(qualities.iter().all(|quality| *quality > 0.9), "{qualities:?}");
    }

    #[test]
    fn a_second_search_is_as_good_within_noise() {
        for seed in 0..10 {
            let (first, second) = (quality(seed, 300, 0.1).0, quality(seed + 1000, 300, 0.1).0);
            assert!((first / second - 1.0).abs() < 0.06, "{first} and {second}");
        }
    }

    #[test]
    fn without_noise_the_choice_is_as_good_as_the_best_and_small() {
        let (quality, found) = quality(1, 300, 0.0);
        assert!(quality >= 0.97, "{quality}");
        let smallest = found.tried[..found.equal].iter().map(|candidate| cost(&candidate.config)).min();
        assert!(!found.is_start && Some(cost(&found.best().config)) == smallest);
        let text = found.confidence();
        assert!(text.contains(" tried") && (found.equal == 1 || text.contains("indistinguishable")), "{text}");
    }

    #[test]
    fn a_small_budget_is_exceeded_by_a_round_of_the_finalists_at_most() {
        for trials in 5..40 {
            let (_, found) = quality(2, trials, 0.1);
            let made: usize = found.tried.iter().map(|candidate| candidate.gb_per_s.len()).sum();
            assert!(made <= trials.max(5) as usize + FINALISTS + 1, "{made} of {trials}");
        }
    }

    #[test]
    fn an_interrupted_search_keeps_the_best_so_far() {
        for (after, expected) in [(0, None), (1, Some(1)), (30, Some(20))] {
            let mut count = 0;
            let mut trial = |config: &Config| {
                count += 1;
                if count > after { Err(Error::Interrupted) } else { Ok(true_speed(config)) }
            };
            let found = search(&space(), &Config::default(), &|| 0.0, &mut trial);
            match expected {
                None => assert!(matches!(found, Err(Error::Interrupted))),
                Some(tried) => {
                    let found = found.unwrap();
                    assert!(found.is_interrupted && found.tried.len() >= tried.min(after), "{}", found.tried.len());
                    assert!(found.confidence().contains("stopped early"));
                }
            }
        }
    }

    #[test]
    fn the_default_stays_where_nothing_is_better() {
        // All settings are as good, and most are smaller.
        let mut trial = |config: &Config| Ok(if *config == Config::default() { 9.9 } else { 10.0 });
        let done = Cell::new(0);
        let spent = || f64::from(done.replace(done.get() + 1)) / 300.0;
        let found = search(&space(), &Config::default(), &spent, &mut trial).unwrap();
        assert!(found.is_start && found.equal > 1, "{}", found.equal);
        assert_eq!(found.best().config, Config::default());
        assert!(found.confidence().ends_with("the default was kept"), "{}", found.confidence());
    }

    #[test]
    fn a_failed_trial_ends_the_search() {
        let mut trial = |_: &Config| Err(Error::failed("the disk failed"));
        assert!(search(&space(), &Config::default(), &|| 0.0, &mut trial).is_err());
    }

    #[test]
    fn the_default_always_takes_part() {
        let (_, found) = quality(3, 40, 0.1);
        assert!(found.tried.iter().any(|candidate| candidate.config == Config::default()));
    }
}
