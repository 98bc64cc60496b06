//! Save and read the replaced files, and track their possible contents.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use deepnvme_checkpoint::write::{POOL_BYTES_MAX, Staging};
use deepnvme_checkpoint::{Error, Result};
use deepnvme_file::Target;
use deepnvme_io::{Durability, Engine, ErrorKind};
use deepnvme_mem::sync::ignore_poison;
use deepnvme_simulation_runtime::thread;
use rustix::io::Errno;

use crate::scenario::content::{self, Content, FoundContent, SaveRequest};
use crate::scenario::context::Context;
use crate::scenario::payload::Version;
use crate::scenario::save_log::SaveLog;

/// Memory of the largest state.
const STATE_BYTES_MAX: u64 = 256 << 10;
/// Memory for reading and comparing a file.
const READING_BYTES: u64 = 128 << 10;
/// Read attempts while a set changes.
const READ_ATTEMPTS_MAX: u32 = 50;

/// One file, and all its names.
pub(super) struct Item {
    pub(super) names: Vec<Target>,
    pub(super) log: Mutex<SaveLog>,
}

pub(super) struct Scenario {
    /// Steps of a process at which it may die.
    pub(super) steps_max: u64,
    pub(super) content: Content,
    pub(super) items: Vec<Item>,
    pub(super) folders: Vec<PathBuf>,
    /// Where the files are that are converted, one for each version.
    pub(super) sources: Option<PathBuf>,
    pub(super) next_version: Mutex<Version>,
    pub(super) is_overclaiming: bool,
    /// Durabilities of saves, drawn uniformly.
    pub(super) durabilities: &'static [Durability],
    /// Saves that are given up, per thousand.
    pub(super) cancelled_per_mille: u32,
    pub(super) seed: u64,
}

impl Item {
    fn copy(&self) -> Self {
        Self { names: self.names.clone(), log: Mutex::new(lock(&self.log).clone()) }
    }
}

impl Scenario {
    /// Copies the state so far.
    pub(super) fn copy(&self) -> Self {
        Self {
            steps_max: self.steps_max,
            content: self.content,
            items: self.items.iter().map(Item::copy).collect(),
            folders: self.folders.clone(),
            sources: self.sources.clone(),
            next_version: Mutex::new(*ignore_poison(self.next_version.lock())),
            is_overclaiming: self.is_overclaiming,
            durabilities: self.durabilities,
            cancelled_per_mille: self.cancelled_per_mille,
            seed: self.seed,
        }
    }

    /// Returns the memory bound of saving a version, including the state itself.
    pub(super) fn memory_bound(&self, version: Version) -> u64 {
        POOL_BYTES_MAX + self.content.state_bytes(self.seed, version)
    }

    /// Returns a reader's memory bound, in addition to the engine's bounce memory. It includes the state once.
    pub(super) fn reading_bound(&self) -> u64 {
        STATE_BYTES_MAX + READING_BYTES
    }

    /// Returns the memory that a process's saves share, if they do.
    pub(super) fn staging(&self, context: &Context, process: u32) -> Option<Staging> {
        let mut rng = context.rng(7000 + u64::from(process));
        if self.content == Content::Bytes || rng.chance(500) {
            return None;
        }
        Staging::new(rng.within(1..100_000)).ok()
    }
}

/// Reports a save that failed without an injected failure.
pub(super) fn report_failure(context: &Context, outcome: Result<()>) {
    let Err(error) = outcome else { return };
    let is_excused = context.world.is_dead(thread::process()) || context.world.state().setup.failing_per_mille > 0;
    if !is_excused {
        context.fail(format!("a save failed, though nothing else did: {error}"));
    }
}

/// Parameters of a save.
pub(super) struct SaveChoice {
    /// Index of the name to use.
    pub(super) name: usize,
    pub(super) durability: Durability,
    /// Everything is prepared, or cancelled on the way, and then dropped.
    pub(super) is_cancelled: bool,
    pub(super) staging: Option<Staging>,
}

impl Default for SaveChoice {
    fn default() -> Self {
        Self { name: 0, durability: Durability::Full, is_cancelled: false, staging: None }
    }
}

/// Replaces the file.
pub(super) fn save(
    context: &Context,
    scenario: &Scenario,
    engine: &Arc<Engine>,
    item: usize,
    choice: &SaveChoice,
) -> Result<()> {
    let item = &scenario.items[item];
    let version = {
        let mut next = ignore_poison(scenario.next_version.lock());
        *next += 1;
        *next
    };
    lock(&item.log).begin(version, choice.durability);
    let _allowance = context.world.allow_memory(scenario.memory_bound(version));
    let request = SaveRequest {
        engine,
        target: &item.names[choice.name],
        seed: scenario.seed,
        version,
        durability: if scenario.is_overclaiming { Durability::None } else { choice.durability },
        staging: choice.staging.clone(),
        is_cancelled: choice.is_cancelled,
    };
    let written = match &scenario.sources {
        Some(folder) => content::convert_from(&source_of(folder, version), &request).map(|()| None),
        None => scenario.content.write(&request).map(Some),
    };
    let outcome = match written {
        Err(error) if choice.is_cancelled && is_cancellation(&error) => Ok(()),
        Err(error) => Err(error),
        Ok(_) if choice.is_cancelled => Ok(()),
        Ok(written) => written.map_or(Ok(()), |written| written.commit(request.durability)),
    };
    lock(&item.log).end(version, outcome.is_ok() && !choice.is_cancelled);
    outcome
}

/// Returns the file that is converted to a version.
pub(super) fn source_of(folder: &Path, version: Version) -> PathBuf {
    folder.join(format!("source-{version}.safetensors"))
}

pub(super) fn lock(log: &Mutex<SaveLog>) -> MutexGuard<'_, SaveLog> {
    ignore_poison(log.lock())
}

/// Returns whether an error reports a cancellation.
fn is_cancellation(error: &Error) -> bool {
    matches!(error, Error::Interrupted) || matches!(error, Error::Io(error) if error.kind() == ErrorKind::Cancelled)
}

/// Reads a name.
pub(super) fn read(scenario: &Scenario, engine: &Arc<Engine>, target: &Target) -> Result<FoundContent> {
    let mut attempts = 0;
    loop {
        match scenario.content.read(engine, target, scenario.seed) {
            // A set may have been replaced between its manifest and its parts.
            Err(error) if is_missing(&error) && attempts < READ_ATTEMPTS_MAX => {
                attempts += 1;
                if !scenario.content.exists(&target.path()) {
                    return Ok(FoundContent::Missing);
                }
                thread::yield_now();
            }
            read => return read,
        }
    }
}

fn is_missing(error: &Error) -> bool {
    matches!(error, Error::Io(error) if error.errno() == Some(Errno::NOENT.raw_os_error()))
}
