//! `deepnvme tune`: the settings that suit a disk, found in a minute.
//!
//! `space` is what there is to choose from, `search` (pure) chooses by trials, this file makes the trials and puts the
//! choices together. `compare` measures stored settings again.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use deepnvme_io::probe::Probe;
use deepnvme_io::{BackendChoice, Config, DirectMode, Durability, shown};
use serde::Serialize;

use crate::error::{Error, Result};
use crate::measure::{Cache, Contestant, Direction, Memory, Moment, Order, Runner, Watch, Workload};

pub mod compare;
pub mod search;
pub mod space;

pub use search::{Candidate, Found};
pub use space::Space;

/// Shortest budget.
pub const BUDGET_MIN: Duration = Duration::from_secs(1);
/// Of the budget of a folder, what finding the settings for both directions together may use.
const BOTH_SHARE: f64 = 0.15;
/// Rounds in which the finalists of both directions meet.
const BOTH_ROUNDS: usize = 3;
/// How many finalists of each direction meet.
const BOTH_FINALISTS: usize = 4;

/// What to search, where, and for how long.
#[derive(Clone, Debug)]
pub struct Options {
    /// The folders, each searched on its own; several also together.
    pub folders: Vec<PathBuf>,
    /// Of all searches together.
    pub budget: Duration,
    /// Bytes of a trial.
    pub io_bytes: u64,
    /// The directions to search.
    pub directions: Vec<Direction>,
    /// What bytes come from or go to.
    pub memory: Memory,
    /// The GPU that has the memory instead of the host.
    pub gpu: Option<u32>,
    /// Whether its bytes go by way of cuFile in folders where that takes the short way.
    pub gds: bool,
    /// What a write waits for.
    pub durability: Durability,
    /// What there is to choose from; `None` for what suits the machine.
    pub space: Option<Space>,
}

/// What was found.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// Of deepnvme.
    pub version: &'static str,
    /// What was to choose from: where the places differ, in the last one.
    pub space: Space,
    /// How many settings that is.
    pub space_len: usize,
    /// Bytes of a trial.
    pub io_bytes: u64,
    /// The GPU that had the memory, where one had.
    pub gpu: Option<u32>,
    /// Seconds that the search took.
    pub seconds: f64,
    /// A search per folder, and one over all of several.
    pub places: Vec<Place>,
    /// Whether somebody stopped it.
    pub is_interrupted: bool,
}

/// The searches in a folder, or in several together.
#[derive(Clone, Debug, Serialize)]
pub struct Place {
    /// Where.
    #[serde(serialize_with = "shown::serialize_all")]
    pub folders: Vec<PathBuf>,
    /// The way that bytes of the GPU took there, where cuFile was wanted.
    pub gds: Option<GdsWay>,
    /// The best for reading.
    pub read: Option<Choice>,
    /// The best for writing.
    pub write: Option<Choice>,
    /// The best for both: what an engine that does both gets.
    pub both: Option<Config>,
}

/// The way between a folder and a GPU.
#[derive(Clone, Debug, Serialize)]
pub struct GdsWay {
    /// `cufile`, or `bounce`: through slots of host memory.
    pub way: &'static str,
    /// Why not the shorter one.
    pub reason: Option<String>,
}

/// The outcome of one search.
#[derive(Clone, Debug, Serialize)]
pub struct Choice {
    /// The settings.
    pub config: Config,
    /// Median of their trials, 10^9 bytes per second.
    pub gb_per_s: f64,
    /// Median of the trials of the settings that one has without tuning.
    pub gb_per_s_default: f64,
    /// How sure it is.
    pub statement: String,
    /// Everything that was tried, the best first.
    pub tried: Vec<Trial>,
}

/// Settings, and how they did.
#[derive(Clone, Debug, Serialize)]
pub struct Trial {
    /// The settings.
    pub config: Config,
    /// Of each trial.
    pub gb_per_s: Vec<f64>,
}

/// Searches. What was made is removed, however it ends; when it is interrupted, the best so far is what was found.
///
/// # Errors
/// `Usage` for what makes no sense, what the machine refused, or `Interrupted` before anything was found.
pub fn run(options: &Options, watch: &mut dyn Watch) -> Result<Outcome> {
    check(options)?;
    let space = options.space.clone().unwrap_or_else(|| usual_space(options));
    space.check()?;
    let began = Instant::now();
    let mut places: Vec<Vec<PathBuf>> = options.folders.iter().map(|folder| vec![folder.clone()]).collect();
    if places.len() > 1 {
        places.push(options.folders.clone());
    }
    let share = options.budget / places.len() as u32;
    let mut found = Vec::new();
    let mut searched = space.clone();
    let mut is_interrupted = false;
    for folders in places {
        match search_place(options, &space, folders, share, watch) {
            Ok((place, space)) => {
                found.push(place);
                searched = space;
            }
            Err(Error::Interrupted) if !found.is_empty() => is_interrupted = true,
            Err(error) => return Err(error),
        }
        is_interrupted |= watch.is_interrupted();
        if is_interrupted {
            break;
        }
    }
    let space_len = searched.len();
    let (io_bytes, seconds) = (options.io_bytes, began.elapsed().as_secs_f64());
    Ok(Outcome {
        version: env!("CARGO_PKG_VERSION"),
        space: searched,
        space_len,
        io_bytes,
        gpu: options.gpu,
        seconds,
        places: found,
        is_interrupted,
    })
}

fn check(options: &Options) -> Result<()> {
    if options.budget < BUDGET_MIN {
        return Err(Error::usage("--budget must be at least 1s; 60s is usual"));
    }
    if options.directions.is_empty() {
        return Err(Error::usage("--no-read and --no-write together leave nothing to tune; leave one out"));
    }
    workload(options, options.folders.clone()).check()
}

fn workload(options: &Options, folders: Vec<PathBuf>) -> Workload {
    Workload {
        direction: options.directions.first().copied().unwrap_or(Direction::Read),
        folders,
        stripe_bytes: None,
        io_bytes: options.io_bytes,
        order: Order::Sequential,
        memory: options.memory,
        gpu: options.gpu,
        buffer_bytes: None,
        cache: Cache::Cold,
        durability: options.durability,
        validate: false,
        config: Config { gds: gds_wanted(options), ..Config::default() },
    }
}

fn gds_wanted(options: &Options) -> DirectMode {
    if options.gds { DirectMode::Preferred } else { DirectMode::Disabled }
}

/// What suits this machine.
#[must_use]
pub fn usual_space(options: &Options) -> Space {
    let probe = Probe::run();
    let known = [
        (BackendChoice::Uring, probe.uring.works()),
        (BackendChoice::Aio, probe.aio.works()),
        (BackendChoice::Threads, probe.threads.works()),
    ];
    // The first that works by the name of Auto: with it, callers may still make small transfers themselves.
    let working = known.into_iter().filter_map(|(choice, works)| works.then_some(choice)).skip(1);
    let backends = std::iter::once(BackendChoice::Auto).chain(working).collect();
    Space::of_machine(cpus(), backends, options.memory == Memory::Plain || options.gpu.is_some())
}

fn cpus() -> u32 {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u32
}

/// The way that the bytes of a runner's first round have taken.
fn way(runner: &Runner) -> GdsWay {
    let stats = runner.engine().stats();
    match stats.gds_reason {
        None if stats.bytes_gds > 0 => GdsWay { way: "cufile", reason: None },
        reason => GdsWay { way: "bounce", reason: reason.or_else(|| Some("the trials are too small for it".into())) },
    }
}

fn search_place(
    options: &Options,
    space: &Space,
    folders: Vec<PathBuf>,
    budget: Duration,
    watch: &mut dyn Watch,
) -> Result<(Place, Space)> {
    let mut runner = Runner::prepare(workload(options, folders.clone()), watch)?;
    let gds = options.gds.then(|| way(&runner));
    let space = match &gds {
        Some(way) if way.way == "cufile" => {
            let given = options.space.clone().map(|space| Space { gds: DirectMode::Preferred, ..space });
            &given.unwrap_or_else(|| Space::of_cufile(cpus()))
        }
        _ => space,
    };
    let mut place = Place { folders, gds, read: None, write: None, both: None };
    let start = start(space);
    let share = 1.0 - if options.directions.len() > 1 { BOTH_SHARE } else { 0.0 };
    let each = budget.mul_f64(share / options.directions.len() as f64);
    let mut founds = Vec::new();
    for direction in &options.directions {
        let began = Instant::now();
        let spent = || began.elapsed().as_secs_f64() / each.as_secs_f64();
        let mut trials = Trials { runner: &mut runner, direction: *direction, spent: &spent, watch };
        let found = match search::search(space, &start, &spent, &mut |config| trials.measure(config)) {
            Err(Error::Interrupted) if !founds.is_empty() => break,
            found => found?,
        };
        let choice = Choice::of(&found, &start);
        match direction {
            Direction::Read => place.read = Some(choice),
            Direction::Write => place.write = Some(choice),
        }
        founds.push((*direction, found));
    }
    place.both = Some(both(&founds, &start, &mut runner, watch)?);
    Ok((place, space.clone()))
}

/// What one has without tuning, or the first of a space that was given and does not hold that.
fn start(space: &Space) -> Config {
    let usual = Config::default();
    // Of a space that names back ends, the one that Auto would take comes first.
    let backend = space.backend.first().copied().unwrap_or_default();
    Config { backend, gds: space.gds, ..usual }
}

/// The finalists of both directions, in turn: by the product of their speeds, each against the best of its direction, the
/// best of them, or the smallest that is as good.
fn both(founds: &[(Direction, Found)], start: &Config, runner: &mut Runner, watch: &mut dyn Watch) -> Result<Config> {
    if let [(_, found)] = founds {
        return Ok(found.best().config.clone());
    }
    let mut candidates: Vec<Config> = Vec::new();
    let finalists = founds.iter().flat_map(|(_, found)| {
        let finalists = found.tried.iter().take(BOTH_FINALISTS).map(|candidate| &candidate.config);
        std::iter::once(&found.best().config).chain(finalists)
    });
    for config in std::iter::once(start).chain(finalists) {
        if !candidates.contains(config) {
            candidates.push(config.clone());
        }
    }
    let mut scores = vec![Vec::new(); candidates.len()];
    for round in 0..BOTH_ROUNDS {
        for (direction, found) in founds {
            let best = found.tried[0].median();
            let mut trials = Trials { runner, direction: *direction, spent: &|| 1.0, watch };
            for turn in 0..candidates.len() {
                let index = if round % 2 == 0 { turn } else { candidates.len() - 1 - turn };
                match trials.measure(&candidates[index]) {
                    Ok(speed) => scores[index].push(speed / best),
                    // The search is over; what it found stands.
                    Err(Error::Interrupted) => return Ok(founds[0].1.best().config.clone()),
                    Err(error) => return Err(error),
                }
            }
        }
    }
    let product = |index: &usize| {
        let per_direction = (0..founds.len()).map(|direction| {
            let of_direction = scores[*index].iter().enumerate();
            // A round has a score of each candidate per direction, in the order of the directions.
            let own: Vec<_> = of_direction.filter(|(at, _)| at % founds.len() == direction).map(|(_, s)| *s).collect();
            crate::bench::summary::median(&own)
        });
        per_direction.product::<f64>()
    };
    let products: Vec<_> = (0..candidates.len()).map(|index| product(&index)).collect();
    let best = products.iter().copied().fold(0.0, f64::max);
    // As near as makes no difference in each direction: then the smallest.
    let equals =
        products.iter().zip(candidates).filter(|(product, _)| **product >= best * search::EQUAL * search::EQUAL);
    Ok(equals.map(|(_, config)| config).min_by_key(space::cost).unwrap_or_else(|| start.clone()))
}

impl Choice {
    fn of(found: &Found, start: &Config) -> Self {
        let usual = found.tried.iter().find(|candidate| candidate.config == *start).map_or(0.0, Candidate::median);
        Self {
            config: found.best().config.clone(),
            gb_per_s: found.best().median(),
            gb_per_s_default: usual,
            statement: found.statement(),
            tried: found
                .tried
                .iter()
                .map(|candidate| Trial { config: candidate.config.clone(), gb_per_s: candidate.gb_per_s.clone() })
                .collect(),
        }
    }
}

/// Trials of one direction.
struct Trials<'a> {
    runner: &'a mut Runner,
    direction: Direction,
    spent: &'a dyn Fn() -> f64,
    watch: &'a mut dyn Watch,
}

impl Trials<'_> {
    fn measure(&mut self, config: &Config) -> Result<f64> {
        if self.watch.is_interrupted() {
            return Err(Error::Interrupted);
        }
        let mut quiet = Quiet { direction: self.direction, spent: self.spent, watch: self.watch };
        self.runner.change(self.direction, config, &mut quiet)?;
        Ok(self.runner.round(&mut quiet)?.gb_per_s())
    }
}

/// Shows how much of the budget has gone, instead of every trial's bytes.
struct Quiet<'a> {
    direction: Direction,
    spent: &'a dyn Fn() -> f64,
    watch: &'a mut dyn Watch,
}

impl Watch for Quiet<'_> {
    fn see(&mut self, moment: &Moment<'_>) {
        let contestant = match self.direction {
            Direction::Read => "read",
            Direction::Write => "write",
        };
        let (bytes_total, bytes_done) = (1000, ((self.spent)() * 1000.0).min(1000.0) as u64);
        self.watch.see(&Moment {
            contestant,
            bytes_total,
            bytes_done,
            phase: crate::measure::Phase::Tuning,
            ..*moment
        });
    }

    fn is_interrupted(&self) -> bool {
        self.watch.is_interrupted()
    }
}
