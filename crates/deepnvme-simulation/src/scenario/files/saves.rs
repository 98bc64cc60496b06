//! The files that are replaced: how one is saved and read, and what is known of it.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use deepnvme_checkpoint::write::{POOL_BYTES_MAX, Staging};
use deepnvme_checkpoint::{Error, Result};
use deepnvme_file::Target;
use deepnvme_io::{Durability, Engine, ErrorKind};
use deepnvme_mem::sync::ignore_poison;
use deepnvme_simulation_runtime::thread;
use rustix::io::Errno;

use crate::scenario::content::{Content, Order, Shown};
use crate::scenario::context::Context;
use crate::scenario::log::Log;
use crate::scenario::payload::Version;

/// Memory of the largest state.
const STATE_BYTES_MAX: u64 = 256 << 10;
/// Memory through which a file is read and compared.
const READING_BYTES: u64 = 128 << 10;
/// Times that a reader begins again when a set changes under it.
const READ_ATTEMPTS_MAX: u32 = 50;

/// One file, and all ways to name it.
pub(super) struct Item {
    pub(super) ways: Vec<Target>,
    pub(super) log: Mutex<Log>,
}

pub(super) struct Play {
    /// The steps of a process at which it may die.
    pub(super) steps_max: u64,
    pub(super) content: Content,
    pub(super) items: Vec<Item>,
    pub(super) folders: Vec<PathBuf>,
    pub(super) next_version: Mutex<Version>,
    pub(super) is_boastful: bool,
    /// What saves ask for, one as often as the other.
    pub(super) durabilities: &'static [Durability],
    /// Saves that are given up, of a thousand.
    pub(super) given_up: u32,
    pub(super) seed: u64,
}

impl Item {
    fn copy(&self) -> Self {
        Self { ways: self.ways.clone(), log: Mutex::new(lock(&self.log).clone()) }
    }
}

impl Play {
    /// The same with what has happened by now.
    pub(super) fn copy(&self) -> Self {
        Self {
            steps_max: self.steps_max,
            content: self.content,
            items: self.items.iter().map(Item::copy).collect(),
            folders: self.folders.clone(),
            next_version: Mutex::new(*ignore_poison(self.next_version.lock())),
            is_boastful: self.is_boastful,
            durabilities: self.durabilities,
            given_up: self.given_up,
            seed: self.seed,
        }
    }

    /// What a save of that version may use, with the state itself.
    pub(super) fn memory_bound(&self, version: Version) -> u64 {
        POOL_BYTES_MAX + self.content.state_bytes(self.seed, version)
    }

    /// What a reader may use beside the engine's bounce memory, which has the state in memory once.
    pub(super) fn reading_bound(&self) -> u64 {
        STATE_BYTES_MAX + READING_BYTES
    }

    /// Memory that the saves of a process share, if they do.
    pub(super) fn staging(&self, context: &Context, process: u32) -> Option<Staging> {
        let mut rng = context.rng(7000 + u64::from(process));
        if self.content == Content::Bytes || rng.chance(500) {
            return None;
        }
        Staging::new(rng.within(1..100_000)).ok()
    }
}

/// A save may fail only where something was made to fail.
pub(super) fn complain(context: &Context, outcome: Result<()>) {
    let Err(error) = outcome else { return };
    let is_excused = context.world.is_dead(thread::process()) || context.world.state().setup.failing > 0;
    if !is_excused {
        context.fail(format!("a save failed, though nothing else did: {error}"));
    }
}

/// How a save is made.
pub(super) struct Way {
    /// By which of its names.
    pub(super) name: usize,
    pub(super) durability: Durability,
    /// All is prepared, or stopped on the way, and then dropped.
    pub(super) gives_up: bool,
    pub(super) staging: Option<Staging>,
}

impl Default for Way {
    fn default() -> Self {
        Self { name: 0, durability: Durability::Full, gives_up: false, staging: None }
    }
}

/// Replaces the file.
pub(super) fn save(context: &Context, play: &Play, engine: &Arc<Engine>, item: usize, way: &Way) -> Result<()> {
    let item = &play.items[item];
    let version = {
        let mut next = ignore_poison(play.next_version.lock());
        *next += 1;
        *next
    };
    lock(&item.log).begin(version, way.durability);
    let _room = context.world.room(play.memory_bound(version));
    let order = Order {
        engine,
        target: &item.ways[way.name],
        seed: play.seed,
        version,
        durability: if play.is_boastful { Durability::None } else { way.durability },
        staging: way.staging.clone(),
        is_stopped: way.gives_up,
    };
    let outcome = match play.content.write(&order) {
        Err(error) if way.gives_up && is_stop(&error) => Ok(()),
        Err(error) => Err(error),
        Ok(_) if way.gives_up => Ok(()),
        Ok(written) => written.commit(order.durability),
    };
    lock(&item.log).end(version, outcome.is_ok() && !way.gives_up);
    outcome
}

pub(super) fn lock(log: &Mutex<Log>) -> MutexGuard<'_, Log> {
    ignore_poison(log.lock())
}

/// Whether it says that somebody stopped it.
fn is_stop(error: &Error) -> bool {
    matches!(error, Error::Interrupted) || matches!(error, Error::Io(error) if error.kind() == ErrorKind::Cancelled)
}

/// What a name shows.
pub(super) fn read(play: &Play, engine: &Arc<Engine>, target: &Target) -> Result<Shown> {
    let mut attempts = 0;
    loop {
        match play.content.read(engine, target, play.seed) {
            // A set may have been replaced between its manifest and its parts.
            Err(error) if is_missing(&error) && attempts < READ_ATTEMPTS_MAX => {
                attempts += 1;
                if !play.content.is_there(&target.path()) {
                    return Ok(Shown::Nothing);
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
