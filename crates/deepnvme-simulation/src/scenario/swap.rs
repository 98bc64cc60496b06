//! Several processes swap in the same folders, and some die. Each finds its own items, and no files of dead processes
//! remain.

use std::path::PathBuf;
use std::sync::Arc;

use deepnvme_simulation_runtime::thread;
use deepnvme_swap::{Error, Options, Swapper};
use deepnvme_testkit::rng::Rng;

use super::context::Context;
use super::folders::{make_folders, may_be_foreign};
use super::payload;
use super::users::{self, SquattedNames};

/// Memory of one swapper: less than all its items need.
const MEMORY_BYTES: usize = 48 << 10;
const KEYS: u64 = 6;
/// The largest item.
const ITEM_BYTES_MAX: u64 = 24 << 10;

struct Scenario {
    folders: Vec<PathBuf>,
    seed: u64,
    is_named: bool,
    has_checksums: bool,
}

/// Run the scenario.
pub(super) fn run(context: &Context) {
    let mut rng = context.rng(1);
    let folders = make_folders(context, rng.within(1..3) as usize);
    let scenario =
        Arc::new(Scenario { folders, seed: rng.next_u64(), is_named: rng.chance(700), has_checksums: rng.chance(500) });
    for folder in &scenario.folders {
        for name in [".deepnvme-swap-1-0", ".deepnvme-swap-1-0011223344556677", ".deepnvme-swap-unnamed", "precious"] {
            if rng.chance(500) {
                users::create_user_file(context, &folder.join(name));
            }
        }
    }
    let processes = rng.within(1..4) as u32;
    let is_cut = context.draw_crash(&mut rng, processes, 3, 1..200, 1..150);
    context.world.bound_memory();
    let watched = Arc::clone(&scenario);
    context.check_crashes(400, 3, move || {
        let seen = Arc::clone(&watched);
        move |context: &Context, _| check_end(context, &seen)
    });
    let mut running: Vec<_> = (1..=processes).map(|id| swapper(context, &scenario, id)).collect();
    if rng.chance(600) {
        running.push(users::start_squatter(context, scenario.folders.clone(), SquattedNames::Private));
    }
    context.finish_running(running, is_cut);
    check_end(context, &scenario);
}

/// Check that the next swapper removes all files of ended processes, and leaves none of its own.
fn check_end(context: &Context, scenario: &Arc<Scenario>) {
    let next = swapper(context, scenario, 500);
    context.join(vec![next]);
    if context.world.state().setup.has_locks {
        for folder in &scenario.folders {
            for path in users::own_files_in(context, folder) {
                if !may_be_foreign(context, &path) {
                    context.fail(format!("{} is left behind", path.display()));
                }
            }
        }
    }
    users::check_user_files(context);
}

fn swapper(context: &Context, scenario: &Arc<Scenario>, id: u32) -> thread::JoinHandle<()> {
    let scenario = Arc::clone(scenario);
    context.process(id, move |context| {
        let mut rng = context.rng(10 + u64::from(id));
        let outcome = use_swapper(context, &scenario, id, &mut rng);
        let is_excused = context.world.is_dead(id) || context.world.state().setup.failing_per_mille > 0;
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

fn use_swapper(context: &Context, scenario: &Scenario, id: u32, rng: &mut Rng) -> Result<(), Error> {
    // Includes the memory of an item that is stored or was borrowed.
    let _allowance = context.world.allow_memory(MEMORY_BYTES as u64 + ITEM_BYTES_MAX);
    let engine = context.engine(u64::from(id))?;
    let options = Options {
        folders: scenario.folders.clone(),
        is_named: scenario.is_named,
        has_checksums: scenario.has_checksums,
        stripe_bytes: 4096,
        ..Options::new(scenario.folders[0].clone(), MEMORY_BYTES)
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
            swapper.put(&key.to_string(), &payload::region_with(&payload::content(scenario.seed, new)).region())?;
            *version = Some(new);
            continue;
        }
        let borrowed = swapper.borrow(&key.to_string(), false, &mut || false)?;
        let region = borrowed.region();
        let mut bytes = vec![0; region.len()];
        region.copy_to_slice(0, &mut bytes);
        if payload::recognise(scenario.seed, &bytes) != *version {
            context.fail(format!("a swapper returns {} bytes that nobody put there", bytes.len()));
        }
    }
    let resident = swapper.stats().resident_bytes_peak;
    if resident > MEMORY_BYTES as u64 {
        context.fail(format!("{resident} bytes are in memory, of {MEMORY_BYTES}"));
    }
    Ok(())
}
