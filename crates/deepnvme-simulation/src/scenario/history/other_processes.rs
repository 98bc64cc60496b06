//! Processes other than those that save: readers, bad sectors, and users who move checkpoints.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_checkpoint::history::{MANIFEST, Manifest, is_checkpoint};
use deepnvme_io::fs::{self, OFlags};
use deepnvme_io::op::Errno;
use deepnvme_simulation_runtime::thread::{self, ProcessId};

use super::scenario::{Scenario, lock};
use crate::scenario::context::Context;
use crate::scenario::payload;
use crate::world::FIRST_USER;

const READER: ProcessId = FIRST_USER + 1;
const BAD_SECTOR_INJECTOR: ProcessId = FIRST_USER + 2;
const CHECKPOINT_MOVER: ProcessId = FIRST_USER + 3;

/// Reads the manifest now and then: it is whole at any moment.
pub(super) fn reader(context: &Context, scenario: &Arc<Scenario>) -> thread::JoinHandle<()> {
    let scenario = Arc::clone(scenario);
    context.process(READER, move |context| {
        let mut rng = context.rng(2);
        for _ in 0..rng.within(1..5) {
            for _ in 0..rng.below(40) {
                thread::yield_now();
            }
            let path = scenario.folder.join(MANIFEST);
            match fs::read_small(&path, 1 << 20) {
                Ok(text) => {
                    if let Err(problem) = Manifest::parse(&text) {
                        context.fail(format!("a reader sees a manifest that is not whole: {problem}"));
                    }
                }
                Err(_) if !context.world.has_power() => return,
                Err(error) if error.errno() == Some(rustix::io::Errno::NOENT.raw_os_error()) => {}
                Err(error) => context.fail(format!("a reader fails: {error}")),
            }
        }
    })
}

/// Injects bad sectors into the manifest, temporarily.
pub(super) fn bad_sector_injector(context: &Context, scenario: &Arc<Scenario>) -> thread::JoinHandle<()> {
    let scenario = Arc::clone(scenario);
    context.process(BAD_SECTOR_INJECTOR, move |context| {
        let mut rng = context.rng(6);
        for _ in 0..rng.within(1..6) {
            (0..rng.below(150)).for_each(|_| thread::yield_now());
            context.world.make_unreadable(&scenario.folder.join(MANIFEST), rng.below(3));
            (0..rng.below(150)).for_each(|_| thread::yield_now());
            context.world.make_readable();
        }
    })
}

/// Moves checkpoints out of the folder, and back after a while: a disk that was not mounted, or a user who keeps them
/// elsewhere. Some are edited in place meanwhile.
pub(super) fn checkpoint_mover(context: &Context, scenario: &Arc<Scenario>) -> thread::JoinHandle<()> {
    let scenario = Arc::clone(scenario);
    context.process(CHECKPOINT_MOVER, move |context| {
        let mut rng = context.rng(8);
        for _ in 0..rng.within(1..30) {
            (0..rng.below(60)).for_each(|_| thread::yield_now());
            let names = fs::entries(&scenario.folder).unwrap_or_default();
            let names: Vec<_> = names.into_iter().filter(|name| name.to_str().is_some_and(is_checkpoint)).collect();
            if names.is_empty() {
                continue;
            }
            let here = scenario.folder.join(&names[rng.below(names.len() as u64) as usize]);
            let Ok(bytes) = fs::read_small(&here, 1 << 20) else { continue };
            let Some(version) = payload::recognise(scenario.seed, &bytes) else { continue };
            let away = PathBuf::from("/d0/away");
            {
                let mut log = lock(&scenario.log);
                log.moved.insert(version, here.clone());
                log.returned.retain(|path| *path != here);
            }
            if fs::rename_new(&here, &away).is_err() {
                continue;
            }
            let manifest = || Manifest::parse(&fs::read_small(&scenario.folder.join(MANIFEST), 1 << 20).ok()?).ok();
            let name = here.file_name().unwrap_or_default().to_string_lossy();
            // A removal that has begun may have examined the file already.
            let is_committed =
                manifest().is_some_and(|manifest| manifest.checkpoints.iter().any(|entry| entry.file == name));
            let is_edited = is_committed && rng.chance(600) && edit(&away).is_ok();
            (0..rng.below(200)).for_each(|_| thread::yield_now());
            // Once no manifest lists it, none will again.
            let is_forgotten = manifest().is_some_and(|manifest| !manifest.knows(&name));
            let is_back = fs::rename_new(&away, &here).is_ok();
            if is_back && (is_forgotten || is_edited) {
                lock(&scenario.log).returned.push(here);
            }
        }
    })
}

/// Overwrites the first byte. The size, the index and the identity stay.
fn edit(path: &Path) -> Result<(), Errno> {
    let file = fs::open(path, OFlags::WRONLY, 0)?;
    fs::write_all(file.as_fd(), b"?")
}
