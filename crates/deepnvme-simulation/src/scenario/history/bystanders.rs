//! Processes beside those that save: readers, bad sectors, and users who move checkpoints.

use std::path::PathBuf;
use std::sync::Arc;

use deepnvme_checkpoint::history::{MANIFEST, Manifest, is_checkpoint};
use deepnvme_io::fs;
use deepnvme_simulation_runtime::thread;

use super::play::{Play, lock};
use crate::scenario::context::Context;
use crate::scenario::payload;
use crate::world::USERS_FROM;

/// Read the manifest now and then: it is whole at any moment.
pub(super) fn reader(context: &Context, play: &Arc<Play>) -> thread::JoinHandle<()> {
    let play = Arc::clone(play);
    context.process(USERS_FROM + 1, move |context| {
        let mut rng = context.rng(2);
        for _ in 0..rng.within(1..5) {
            for _ in 0..rng.below(40) {
                thread::yield_now();
            }
            let path = play.folder.join(MANIFEST);
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

/// Inject bad sectors into the manifest, temporarily.
pub(super) fn spoiler(context: &Context, play: &Arc<Play>) -> thread::JoinHandle<()> {
    let play = Arc::clone(play);
    context.process(USERS_FROM + 2, move |context| {
        let mut rng = context.rng(6);
        for _ in 0..rng.within(1..6) {
            (0..rng.below(150)).for_each(|_| thread::yield_now());
            context.world.refuse_reading(&play.folder.join(MANIFEST), rng.below(3));
            (0..rng.below(150)).for_each(|_| thread::yield_now());
            context.world.allow_reading();
        }
    })
}

/// Move checkpoints out of the folder, and back after a while: a disk that was not mounted, or a user's archive.
pub(super) fn mover(context: &Context, play: &Arc<Play>) -> thread::JoinHandle<()> {
    let play = Arc::clone(play);
    context.process(USERS_FROM + 3, move |context| {
        let mut rng = context.rng(8);
        for _ in 0..rng.within(1..5) {
            (0..rng.below(100)).for_each(|_| thread::yield_now());
            let names = fs::entries(&play.folder).unwrap_or_default();
            let names: Vec<_> = names.into_iter().filter(|name| name.to_str().is_some_and(is_checkpoint)).collect();
            if names.is_empty() {
                continue;
            }
            let here = play.folder.join(&names[rng.below(names.len() as u64) as usize]);
            let Ok(bytes) = fs::read_small(&here, 1 << 20) else { continue };
            let Some(version) = payload::recognised(play.seed, &bytes) else { continue };
            let away = PathBuf::from("/d0/away");
            lock(&play.log).moved.insert(version, here.clone());
            if fs::rename_new(&here, &away).is_err() {
                continue;
            }
            (0..rng.below(200)).for_each(|_| thread::yield_now());
            // Once no manifest lists it, none will again.
            let listed = fs::read_small(&play.folder.join(MANIFEST), 1 << 20).map(|text| Manifest::parse(&text));
            let is_forgotten = match (listed, here.file_name().and_then(|name| name.to_str())) {
                (Ok(Ok(manifest)), Some(name)) => !manifest.knows(name),
                _ => false,
            };
            if fs::rename_new(&away, &here).is_ok() && is_forgotten {
                lock(&play.log).returned.push(here);
            }
        }
    })
}
