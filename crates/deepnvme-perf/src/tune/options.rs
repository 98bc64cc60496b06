//! The request for a search.

use std::path::PathBuf;
use std::time::Duration;

use deepnvme_io::probe::Probe;
use deepnvme_io::{BackendChoice, Config, DirectMode, Durability};

use super::space::SearchSpace;
use crate::error::{Error, Result};
use crate::measure::{Direction, Memory, MemoryPlace, Workload};

/// Shortest budget.
const BUDGET_MIN: Duration = Duration::from_secs(1);

/// The folders to search, and the budget.
#[derive(Clone, Debug)]
pub struct TuneOptions {
    /// The folders: each is searched on its own, several also together.
    pub folders: Vec<PathBuf>,
    /// The time for all searches.
    pub budget: Duration,
    /// Bytes of a trial.
    pub io_bytes: u64,
    /// The directions to search.
    pub directions: Vec<Direction>,
    /// Where the memory is.
    pub place: MemoryPlace,
    /// Whether to use cuFile in folders where it avoids host memory.
    pub gds: bool,
    /// The durability of a write.
    pub durability: Durability,
    /// The settings to choose from; `None` for those that suit the machine.
    pub space: Option<SearchSpace>,
}

impl TuneOptions {
    /// Checks that the options make sense.
    pub(super) fn check(&self) -> Result<()> {
        if self.budget < BUDGET_MIN {
            return Err(Error::usage("--budget must be at least 1s; the default is 60s"));
        }
        if self.directions.is_empty() {
            return Err(Error::usage("--no-read and --no-write together leave nothing to tune; remove one"));
        }
        workload(self, self.folders.clone()).check()
    }
}

/// Returns the workload of a trial.
pub(super) fn workload(options: &TuneOptions, folders: Vec<PathBuf>) -> Workload {
    let direction = options.directions.first().copied().unwrap_or(Direction::Read);
    Workload {
        place: options.place,
        durability: options.durability,
        config: Config { gds: gds_mode(options), ..Config::default() },
        ..Workload::new(direction, folders, options.io_bytes)
    }
}

fn gds_mode(options: &TuneOptions) -> DirectMode {
    if options.gds { DirectMode::Preferred } else { DirectMode::Disabled }
}

/// Returns the settings that suit this machine.
#[must_use]
pub fn default_space(options: &TuneOptions) -> SearchSpace {
    let probe = Probe::run();
    let backends = [
        (BackendChoice::Uring, probe.uring.works()),
        (BackendChoice::Aio, probe.aio.works()),
        (BackendChoice::Threads, probe.threads.works()),
    ];
    // Auto stands for the first that works: with Auto, callers may still make small transfers themselves.
    let working = backends.into_iter().filter_map(|(choice, works)| works.then_some(choice)).skip(1);
    let backends = std::iter::once(BackendChoice::Auto).chain(working).collect();
    SearchSpace::of_machine(cpus(), backends, options.place.memory == Memory::Plain || options.place.gpu.is_some())
}

pub(super) fn cpus() -> u32 {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u32
}
