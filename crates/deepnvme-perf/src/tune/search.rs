//! The search: successive halving, and a second look around the best. Pure but for the trial, which the caller makes.
//!
//! Single trials are noise on a shared disk. So no candidate is dropped for one: a rung tries all that are left, in turn
//! and in a direction that changes, keeps the better half by the median of all their trials, and gives the next rung
//! another trial. Around what is left the search goes on, step by step, while something beside it is better; the last few
//! are compared round by round.

use deepnvme_io::Config;

use super::space::{Space, cost};
use crate::bench::summary::median;
use crate::error::{Error, Result};

/// Candidates that are left when halving ends.
const FINALISTS: usize = 4;
/// Trials of each finalist at least, as far as the budget goes; more do not change the choice.
const FINAL_TRIALS: usize = 5;
/// Trials of each finalist at the most: then the search ends before its budget.
const FINAL_TRIALS_MAX: usize = 12;
/// Candidates whose median is nearer to the best than this are as good.
pub(super) const EQUAL: f64 = 0.98;
/// Of the budget, what the first bracket may use.
const FIRST_SHARE: f64 = 0.4;
/// Of the budget, what has been used when the search stops looking around its winners; the rest is for the final.
const CLIMB_SHARE: f64 = 0.85;

/// The number of the settings that the search starts from.
const START: usize = 0;

/// Settings, and how they did.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The settings.
    pub config: Config,
    /// GB/s of each trial.
    pub gb_per_s: Vec<f64>,
}

impl Candidate {
    fn new(config: Config) -> Self {
        Self { config, gb_per_s: Vec::new() }
    }

    /// The median of its trials; 0 without any.
    #[must_use]
    pub fn median(&self) -> f64 {
        median(&self.gb_per_s)
    }
}

/// What a search found.
#[derive(Clone, Debug)]
pub struct Found {
    /// All that were tried, the best first.
    pub tried: Vec<Candidate>,
    /// Which of them was chosen.
    pub chosen: usize,
    /// How many could not be told from the best, itself included.
    pub equals: usize,
    /// Whether it was stopped before its time.
    pub is_cut_short: bool,
}

impl Found {
    /// The settings that were chosen.
    #[must_use]
    pub fn best(&self) -> &Candidate {
        &self.tried[self.chosen]
    }

    /// How sure it is, in a sentence.
    #[must_use]
    pub fn statement(&self) -> String {
        let (tried, best) = (self.tried.len(), self.tried[0].median());
        let short = if self.is_cut_short { "; stopped early" } else { "" };
        let gap = (1.0 - self.best().median() / best.max(f64::MIN_POSITIVE)) * 100.0;
        let near = if gap < 0.05 { "the best".to_owned() } else { format!("within {:.1}% of the best", gap.max(0.1)) };
        match self.equals {
            1 => format!("{near} of {tried} tried{short}"),
            equals => format!(
                "{near} of {tried} tried, {equals} candidates indistinguishable; the smallest was chosen{short}"
            ),
        }
    }
}

/// Searches the space. `spent` is the part of the budget that has been used, 0 to 1; `trial` measures once, in GB/s.
///
/// # Errors
/// What a trial ended with, unless it was interrupted: then the best so far is what was found, if anything was.
pub fn search(
    space: &Space,
    start: &Config,
    spent: &dyn Fn() -> f64,
    trial: &mut dyn FnMut(&Config) -> Result<f64>,
) -> Result<Found> {
    let mut tried: Vec<Candidate> = Vec::new();
    let outcome = brackets(space, start, spent, trial, &mut tried);
    let is_cut_short = matches!(outcome, Err(Error::Interrupted));
    if !is_cut_short || tried.iter().all(|candidate| candidate.gb_per_s.is_empty()) {
        outcome?;
    }
    Ok(choose(tried, is_cut_short))
}

fn brackets(
    space: &Space,
    start: &Config,
    spent: &dyn Fn() -> f64,
    trial: &mut dyn FnMut(&Config) -> Result<f64>,
    tried: &mut Vec<Candidate>,
) -> Result<()> {
    // The settings that one has without tuning always take part, or a choice could be worse than none.
    let mut population = vec![index_of(tried, start)];
    debug_assert_eq!(population, [START]);
    let first = std::cell::Cell::new(None);
    for config in space.sample(usize::MAX) {
        // As many as can be tried once in a third of the bracket's time: halving costs as much again for each rung.
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
    // What one has without tuning stands in the final: where it is as good and no larger, nothing needs to change.
    if !finalists.contains(&START) {
        finalists.push(START);
    }
    for round in 0..FINAL_TRIALS_MAX {
        if round >= 1 && spent() >= 1.0 || round >= FINAL_TRIALS && is_clear(&finalists, tried) {
            break;
        }
        rung(&mut finalists, round, trial, tried)?;
    }
    Ok(())
}

/// Steps from the best to what lies beside it, until nothing beside it is better.
fn climb(
    space: &Space,
    mut finalists: Vec<usize>,
    spent: &dyn Fn() -> f64,
    trial: &mut dyn FnMut(&Config) -> Result<f64>,
    tried: &mut Vec<Candidate>,
) -> Result<Vec<usize>> {
    let mut seen: Vec<usize> = Vec::new();
    while spent() < CLIMB_SHARE {
        let beside: Vec<_> =
            finalists.iter().take(2).flat_map(|index| space.neighbours(&tried[*index].config)).collect();
        let mut population = finalists.clone();
        for config in beside {
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

/// Halves until the finalists are left, or the share of the budget is used up.
fn halve(
    mut population: Vec<usize>,
    share: f64,
    spent: &dyn Fn() -> f64,
    trial: &mut dyn FnMut(&Config) -> Result<f64>,
    tried: &mut [Candidate],
) -> Result<Vec<usize>> {
    let mut round = 0;
    while population.len() > FINALISTS {
        if spent() < share {
            rung(&mut population, round, trial, tried)?;
        }
        population.sort_by(|left, right| tried[*right].median().total_cmp(&tried[*left].median()));
        population.truncate(population.len().div_ceil(2).max(FINALISTS));
        round += 1;
    }
    population.sort_by(|left, right| tried[*right].median().total_cmp(&tried[*left].median()));
    Ok(population)
}

/// One trial of everybody, there or back.
fn rung(
    population: &mut [usize],
    round: usize,
    trial: &mut dyn FnMut(&Config) -> Result<f64>,
    tried: &mut [Candidate],
) -> Result<()> {
    let order: Vec<_> =
        if round.is_multiple_of(2) { population.to_vec() } else { population.iter().rev().copied().collect() };
    order.into_iter().try_for_each(|index| measure(tried, index, trial))
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

/// Whether the finalists have been tried enough to tell the best from the second.
fn is_clear(finalists: &[usize], tried: &[Candidate]) -> bool {
    let mut medians: Vec<_> = finalists.iter().map(|index| tried[*index].median()).collect();
    medians.sort_by(|left, right| right.total_cmp(left));
    medians.len() < 2 || medians[1] < medians[0] * EQUAL
}

/// Of all that are as good as the best, the smallest.
fn choose(mut tried: Vec<Candidate>, is_cut_short: bool) -> Found {
    tried.retain(|candidate| !candidate.gb_per_s.is_empty());
    // A candidate that was lucky once has not won: it counts for less until it has been tried often enough.
    let most = tried.iter().map(|candidate| candidate.gb_per_s.len()).max().unwrap_or(1);
    let is_proven = |candidate: &Candidate| candidate.gb_per_s.len() >= most.min(FINAL_TRIALS);
    tried.sort_by(|left, right| is_proven(right).cmp(&is_proven(left)).then(right.median().total_cmp(&left.median())));
    let best = tried[0].median();
    let is_equal = |candidate: &&Candidate| is_proven(candidate) && candidate.median() >= best * EQUAL;
    let equals = tried.iter().take_while(is_equal).count().max(1);
    let chosen = (0..equals).min_by_key(|index| cost(&tried[*index].config)).unwrap_or(0);
    Found { tried, chosen, equals, is_cut_short }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use deepnvme_io::BackendChoice;

    use super::*;

    fn space() -> Space {
        Space::of_machine(4, vec![BackendChoice::Uring, BackendChoice::Aio, BackendChoice::Threads], false)
    }

    /// A disk that likes 64 MiB in flight, two workers and io_uring. More in flight does less harm than less.
    fn truth(config: &Config) -> f64 {
        use deepnvme_io::{SubmitMode, WindowMode};
        let in_flight = (u64::from(config.workers) * u64::from(config.queue_depth) * config.block_bytes) as f64;
        let doublings = (in_flight / f64::from(64 << 20)).log2();
        let depth = 1.0 - if doublings < 0.0 { 0.06 } else { 0.02 } * doublings.abs();
        let workers = 1.0 - 0.05 * (f64::from(config.workers) / 2.0).log2().abs();
        let backend = if config.backend == BackendChoice::Uring { 1.0 } else { 0.93 };
        let window = if config.window == WindowMode::Wave { 0.85 } else { 1.0 };
        let submit = if config.submit == SubmitMode::Single { 0.97 } else { 1.0 };
        6.0 * depth.max(0.2) * workers * backend * window * submit
    }

    /// A search of `trials` trials under noise; the choice's true speed against the best of the space.
    fn quality(seed: u64, trials: u32, noise: f64) -> (f64, Found) {
        let (mut rng, done) = (fastrand::Rng::with_seed(seed), Cell::new(0));
        let space = space();
        let mut trial = |config: &Config| {
            done.set(done.get() + 1);
            // Most disturbances slow down.
            Ok(truth(config) * (1.0 - noise * rng.f64() * rng.f64() * 2.0))
        };
        let spent = || f64::from(done.get()) / f64::from(trials);
        let found = search(&space, &Config::default(), &spent, &mut trial).unwrap();
        let best = space.all().map(|config| truth(&config)).fold(0.0, f64::max);
        (truth(&found.best().config) / best, found)
    }

    #[test]
    fn a_fifth_of_the_grid_finds_its_best_under_noise() {
        let grid = space().len() as u32;
        let qualities: Vec<_> = (0..40).map(|seed| quality(seed, grid / 5, 0.15).0).collect();
        let good = qualities.iter().filter(|quality| **quality >= 0.97).count();
        assert!(good >= 34, "{good} of 40: {qualities:?}");
        assert!(qualities.iter().all(|quality| *quality > 0.9), "{qualities:?}");
    }

    #[test]
    fn a_rerun_lands_within_noise() {
        for seed in 0..10 {
            let (first, second) = (quality(seed, 300, 0.1).0, quality(seed + 1000, 300, 0.1).0);
            assert!((first / second - 1.0).abs() < 0.06, "{first} and {second}");
        }
    }

    #[test]
    fn without_noise_the_choice_is_as_good_as_the_best_and_small() {
        let (quality, found) = quality(1, 300, 0.0);
        assert!(quality >= 0.97, "{quality}");
        let smallest = found.tried[..found.equals].iter().map(|candidate| cost(&candidate.config)).min();
        assert_eq!(Some(cost(&found.best().config)), smallest);
        let text = found.statement();
        assert!(text.contains(" tried") && (found.equals == 1 || text.contains("indistinguishable")), "{text}");
    }

    #[test]
    fn an_interrupted_search_keeps_the_best_so_far() {
        for (after, expected) in [(0, None), (1, Some(1)), (30, Some(20))] {
            let mut count = 0;
            let mut trial = |config: &Config| {
                count += 1;
                if count > after { Err(Error::Interrupted) } else { Ok(truth(config)) }
            };
            let found = search(&space(), &Config::default(), &|| 0.0, &mut trial);
            match expected {
                None => assert!(matches!(found, Err(Error::Interrupted))),
                Some(tried) => {
                    let found = found.unwrap();
                    assert!(found.is_cut_short && found.tried.len() >= tried.min(after), "{}", found.tried.len());
                    assert!(found.statement().contains("stopped early"));
                }
            }
        }
    }

    #[test]
    fn a_failure_that_is_no_interruption_ends_it() {
        let mut trial = |_: &Config| Err(Error::failed("the disk has gone"));
        assert!(search(&space(), &Config::default(), &|| 0.0, &mut trial).is_err());
    }

    #[test]
    fn the_default_always_takes_part() {
        let (_, found) = quality(3, 40, 0.1);
        assert!(found.tried.iter().any(|candidate| candidate.config == Config::default()));
    }
}
