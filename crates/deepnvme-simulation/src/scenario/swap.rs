//! Several processes swap in the same folders, and some die. Each finds its own items, and no files of dead processes
//! remain.

use std::path::PathBuf;
use std::sync::Arc;

use deepnvme_simulation_runtime::thread;
use deepnvme_swap::{Error, Options, Swapper};
use deepnvme_testkit::rng::Rng;

use super::context::Context;
use super::folders::{is_unprovable, make_folders};
use super::payload;
use super::users::{self, Taking};

/// Memory of one swapper: less than all its items need.
const MEMORY_BYTES: usize = 48 << 10;
const KEYS: u64 = 6;
/// The largest item.
const PUT_BYTES_MAX: u64 = 24 << 10;

struct Play {
    folders: Vec<PathBuf>,
    seed: u64,
    is_named: bool,
    has_checksums: bool,
}

/// Run the scenario.
pub(super) fn play(context: &Context) {
    let mut rng = context.rng(1);
    let folders = make_folders(context, rng.within(1..3) as usize);
    let play =
        Arc::new(Play { folders, seed: rng.next_u64(), is_named: rng.chance(700), has_checksums: rng.chance(500) });
    for folder in &play.folders {
        for name in [".deepnvme-swap-1-0", ".deepnvme-swap-1-0011223344556677", ".deepnvme-swap-unnamed", "precious"] {
            if rng.chance(500) {
                users::drop_file(context, &folder.join(name));
            }
        }
    }
    let processes = rng.within(1..4) as u32;
    let is_cut = {
        let mut state = context.world.state();
        match rng.below(3) {
            0 => state.setup.power_cut_at = Some(rng.within(1..200)),
            1 => state.setup.killed = Some((1 + rng.below(processes.into()) as u32, rng.within(1..150))),
            _ => {}
        }
        state.setup.power_cut_at.is_some()
    };
    context.world.bound_memory();
    let watched = Arc::clone(&play);
    context.watch(400, 3, move || {
        let seen = Arc::clone(&watched);
        move |context: &Context, _| aftermath(context, &seen)
    });
    let mut running: Vec<_> = (1..=processes).map(|id| swapper(context, &play, id)).collect();
    if rng.chance(600) {
        running.push(users::mimic(context, play.folders.clone(), Taking::Private));
    }
    context.finish_running(running, is_cut);
    aftermath(context, &play);
}

/// Check that the next swapper removes all files of ended processes, and leaves none of its own.
fn aftermath(context: &Context, play: &Arc<Play>) {
    let next = swapper(context, play, 500);
    context.join(vec![next]);
    if context.world.state().setup.has_locks {
        for folder in &play.folders {
            for path in users::ours_in(context, folder) {
                if !is_unprovable(context, &path) {
                    context.fail(format!("{} is left behind", path.display()));
                }
            }
        }
    }
    users::check_foreign(context);
}

fn swapper(context: &Context, play: &Arc<Play>, id: u32) -> thread::JoinHandle<()> {
    let play = Arc::clone(play);
    context.process(id, move |context| {
        let mut rng = context.rng(10 + u64::from(id));
        let outcome = swap(context, &play, id, &mut rng);
        let is_excused = context.world.is_dead(id) || context.world.state().setup.failing > 0;
        if let (Err(error), false) = (outcome, is_excused) {
            context.fail(format!("a swapper failed without an injected failure: {error}"));
        }
    })
}

/// Create an item and drop it without a commit, as a failed block does. No item may remain.
fn abandon_create(context: &Context, swapper: &Swapper, key: &str, rng: &mut Rng) -> Result<(), Error> {
    let mut garbage = vec![0; rng.within(1..9000) as usize];
    rng.fill(&mut garbage);
    let created = swapper.create(key, garbage.len(), &mut || false)?;
    created.target().copy_from_slice(0, &garbage);
    drop(created);
    match swapper.borrow(key, false, &mut || false) {
        Err(Error::NotFound { .. }) => Ok(()),
        Err(other) => Err(other),
        Ok(_) => {
            context.fail(format!("{key} is an item, though its creation was abandoned"));
            Ok(())
        }
    }
}

fn swap(context: &Context, play: &Play, id: u32, rng: &mut Rng) -> Result<(), Error> {
    // Includes the memory of an item that is stored or was borrowed.
    let _room = context.world.room(MEMORY_BYTES as u64 + PUT_BYTES_MAX);
    let engine = context.engine(u64::from(id))?;
    let options = Options {
        folders: play.folders.clone(),
        is_named: play.is_named,
        has_checksums: play.has_checksums,
        stripe_bytes: 4096,
        ..Options::new(play.folders[0].clone(), MEMORY_BYTES)
    };
    let swapper = Swapper::new(engine, &options)?;
    let mut versions = vec![None; KEYS as usize];
    for turn in 0..rng.within(2..16) {
        let key = rng.below(KEYS);
        let version = &mut versions[key as usize];
        if rng.chance(150) {
            abandon_create(context, &swapper, &key.to_string(), rng)?;
            *version = None;
            continue;
        }
        if rng.chance(500) || version.is_none() {
            let new = u64::from(id) * 1000 + turn;
            swapper.put(&key.to_string(), &payload::holding(&payload::of(play.seed, new)).region())?;
            *version = Some(new);
            continue;
        }
        let borrowed = swapper.borrow(&key.to_string(), false, &mut || false)?;
        let region = borrowed.region();
        let mut bytes = vec![0; region.len()];
        region.copy_to_slice(0, &mut bytes);
        if payload::recognised(play.seed, &bytes) != *version {
            context.fail(format!("a swapper returns {} bytes that nobody put there", bytes.len()));
        }
    }
    let resident = swapper.stats().resident_bytes_peak;
    if resident > MEMORY_BYTES as u64 {
        context.fail(format!("{resident} bytes are in memory, of {MEMORY_BYTES}"));
    }
    Ok(())
}
