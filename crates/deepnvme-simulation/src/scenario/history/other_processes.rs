//! Processes other than those that save: readers, bad sectors, and users who move checkpoints.

use std::ops::Range;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_checkpoint::history::{MANIFEST, Manifest, is_checkpoint};
use deepnvme_io::fs::{self, OFlags};
use deepnvme_io::op::Errno;
use deepnvme_simulation_runtime::thread::{self, ProcessId};
use deepnvme_testkit::rng::Rng;

use super::scenario::{Scenario, lock};
use crate::scenario::context::Context;
use crate::scenario::payload;
use crate::world::FIRST_USER;

const READER: ProcessId = FIRST_USER + 1;
const BAD_SECTOR_INJECTOR: ProcessId = FIRST_USER + 2;
const CHECKPOINT_MOVER: ProcessId = FIRST_USER + 3;

/// Work that a process repeats.
struct Turns {
    /// Of its random numbers.
    purpose: u64,
    count: Range<u64>,
    /// Maximum of the yields before each turn.
    yields_max: u64,
}

impl Turns {
    /// Starts the process. It calls `turn` after each pause.
    fn run(
        self,
        context: &Context,
        process: ProcessId,
        scenario: &Arc<Scenario>,
        turn: impl Fn(&Context, &Scenario, &mut Rng) + Send + 'static,
    ) -> thread::JoinHandle<()> {
        let scenario = Arc::clone(scenario);
        context.process(process, move |context| {
            let mut rng = context.rng(self.purpose);
            for _ in 0..rng.within(self.count) {
                pause(&mut rng, self.yields_max);
                turn(context, &scenario, &mut rng);
            }
        })
    }
}

/// Yields fewer than this many times.
fn pause(rng: &mut Rng, yields_max: u64) {
    (0..rng.below(yields_max)).for_each(|_| thread::yield_now());
}

/// Reads the manifest now and then: it is whole at any moment.
pub(super) fn reader(context: &Context, scenario: &Arc<Scenario>) -> thread::JoinHandle<()> {
    let turns = Turns { purpose: 2, count: 1..5, yields_max: 40 };
    turns.run(context, READER, scenario, |context, scenario, _| {
        match fs::read_small(&scenario.folder.join(MANIFEST), 1 << 20) {
            Ok(text) => {
                if let Err(problem) = Manifest::parse(&text) {
                    context.fail(format!("a reader sees a manifest that is not whole: {problem}"));
                }
            }
            Err(error) => {
                let is_missing = error.errno() == Some(rustix::io::Errno::NOENT.raw_os_error());
                if context.world.has_power() && !is_missing {
                    context.fail(format!("a reader fails: {error}"));
                }
            }
        }
    })
}

/// Injects bad sectors into the manifest, temporarily.
pub(super) fn bad_sector_injector(context: &Context, scenario: &Arc<Scenario>) -> thread::JoinHandle<()> {
    let turns = Turns { purpose: 6, count: 1..6, yields_max: 150 };
    turns.run(context, BAD_SECTOR_INJECTOR, scenario, |context, scenario, rng| {
        context.world.make_unreadable(&scenario.folder.join(MANIFEST), rng.below(3));
        pause(rng, 150);
        context.world.make_readable();
    })
}

/// Moves checkpoints out of the folder, and back after a while: a disk that was not mounted, or a user who keeps them
/// elsewhere. Some are edited in place meanwhile.
pub(super) fn checkpoint_mover(context: &Context, scenario: &Arc<Scenario>) -> thread::JoinHandle<()> {
    let turns = Turns { purpose: 8, count: 1..30, yields_max: 60 };
    turns.run(context, CHECKPOINT_MOVER, scenario, |_, scenario, rng| {
        let names = fs::entries(&scenario.folder).unwrap_or_default();
        let names: Vec<_> = names.into_iter().filter(|name| name.to_str().is_some_and(is_checkpoint)).collect();
        if names.is_empty() {
            return;
        }
        let here = scenario.folder.join(&names[rng.below(names.len() as u64) as usize]);
        let Ok(bytes) = fs::read_small(&here, 1 << 20) else { return };
        let Some(version) = payload::recognise(scenario.seed, &bytes) else { return };
        let away = PathBuf::from("/d0/away");
        {
            let mut log = lock(&scenario.log);
            log.moved.insert(version, here.clone());
            log.returned.retain(|path| *path != here);
        }
        if fs::rename_new(&here, &away).is_err() {
            return;
        }
        let manifest = || Manifest::parse(&fs::read_small(&scenario.folder.join(MANIFEST), 1 << 20).ok()?).ok();
        let name = here.file_name().unwrap_or_default().to_string_lossy();
        // A removal that has begun may have examined the file already.
        let is_committed =
            manifest().is_some_and(|manifest| manifest.checkpoints.iter().any(|entry| entry.file == name));
        let is_edited = is_committed && rng.chance(600) && edit(&away).is_ok();
        pause(rng, 200);
        // Once no manifest lists it, none will again.
        let is_forgotten = manifest().is_some_and(|manifest| !manifest.names().contains(&*name));
        let is_back = fs::rename_new(&away, &here).is_ok();
        if is_back && (is_forgotten || is_edited) {
            lock(&scenario.log).returned.push(here);
        }
    })
}

/// Overwrites the first byte. The size, the index and the identity stay.
fn edit(path: &Path) -> Result<(), Errno> {
    let file = fs::open(path, OFlags::WRONLY, 0)?;
    fs::write_all(file.as_fd(), b"?")
}
