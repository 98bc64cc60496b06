//! Several threads and processes replace files and stripe sets. Each reader sees the old or the new file, complete.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use deepnvme_checkpoint::write::POOL_BYTES_MAX;
use deepnvme_file::{StripeSet, Target};
use deepnvme_io::Durability;
use deepnvme_simulation_runtime::thread;
use deepnvme_testkit::rng::Rng;

use super::content::{self, Content, FoundContent, SaveRequest};
use super::context::{Context, SETUP_ENGINE, SETUP_PROCESS};
use super::folders::make_folders;
use super::payload::Version;
use super::users::{self, TakenNames};
use crate::world::FIRST_USER;

mod end_check;
mod saves;

use end_check::check_end;
use saves::{Item, SaveChoice, Scenario, read, report_failure, save, source_of};

/// Layout of the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FileLayout {
    /// One file.
    Single,
    /// A file striped over several disks.
    Striped,
    /// One file by a saver that claims more than it does, to prove that it is caught.
    Overclaiming,
}

const DURABILITIES: [Durability; 4] = [Durability::None, Durability::Data, Durability::Full, Durability::Full];
const MODEL: &str = "model.bin";
const SHARDED: &str = "model.safetensors";
/// More versions than a run of conversions makes: up to three saves of three threads of three processes, and those before
/// and after them.
const VERSIONS_MAX: Version = 48;

/// Runs checkpoints with the real code that saves and loads them.
pub(super) fn run_saves(context: &Context) {
    let mut rng = context.rng(3);
    let layout = if rng.chance(300) { FileLayout::Striped } else { FileLayout::Single };
    run(context, layout, rng.pick(&[Content::Archive, Content::Safetensors]));
}

/// Runs checkpoints of several files, which an index lists.
pub(super) fn run_shards(context: &Context) {
    run(context, FileLayout::Single, Content::Shards);
}

/// Runs conversions of checkpoints.
pub(super) fn run_conversions(context: &Context) {
    run(context, FileLayout::Single, Content::Converted);
}

/// Runs the scenario.
pub(super) fn run(context: &Context, layout: FileLayout, content: Content) {
    let mut rng = context.rng(1);
    let count = match layout {
        FileLayout::Striped => rng.within(2..4) as usize,
        _ if content == Content::Converted => 2,
        _ => 1,
    };
    let mut folders = make_folders(context, count);
    let sources = if content == Content::Converted { folders.pop() } else { None };
    let items = match layout {
        FileLayout::Single if content == Content::Shards => {
            let item = item(context, &folders[0], SHARDED);
            context.world.allow_replacing(&content::index_of(&item.names[0].path()));
            vec![item]
        }
        FileLayout::Single | FileLayout::Overclaiming => single(context, &folders, &mut rng),
        FileLayout::Striped => striped(context, &folders, &mut rng),
    };
    let scenario = Arc::new(Scenario {
        steps_max: if content == Content::Bytes { 150 } else { 600 },
        content,
        items,
        folders,
        sources,
        next_version: Mutex::new(1),
        is_overclaiming: layout == FileLayout::Overclaiming,
        // After a power cut, a name with one non-durable save allows almost any content.
        durabilities: if rng.chance(500) { &DURABILITIES } else { &DURABILITIES[1..] },
        cancelled_per_mille: rng.pick(&[100, 400]),
        seed: rng.next_u64(),
    });
    create_user_files(context, &scenario, &mut rng);
    if scenario.sources.is_some() {
        create_sources(context, &scenario);
    }
    if rng.chance(600) {
        create_initial_files(context, &scenario);
    }
    let processes = rng.within(1..4) as u32;
    {
        let mut state = context.world.state();
        let steps = rng.within(1..scenario.steps_max * u64::from(processes) + 1);
        match rng.below(3) {
            0 => state.setup.power_cut_at = Some(steps),
            1 => state.setup.killed = Some((1 + rng.below(processes.into()) as u32, rng.within(1..scenario.steps_max))),
            _ => {}
        }
    }
    let is_cut = context.world.state().setup.power_cut_at.is_some();
    context.world.bound_memory();
    // With several files, only few moments reveal a bug.
    let is_rare = layout == FileLayout::Striped || matches!(content, Content::Shards | Content::Converted);
    let chance = if is_rare { 1000 } else { 300 };
    let watched = Arc::clone(&scenario);
    context.check_crashes(chance, 2, move || {
        let seen = watched.copy();
        move |context: &Context, is_cut| check_end(context, &Arc::new(seen.copy()), is_cut)
    });
    let mut running: Vec<_> = (1..=processes).map(|id| writer(context, &scenario, id)).collect();
    if rng.chance(600) {
        running.push(users::start_name_taker(context, scenario.folders.clone(), TakenNames::Private));
    }
    if rng.chance(700) {
        running.push(reader(context, &scenario));
    }
    context.finish_running(running, is_cut);
    check_end(context, &scenario, is_cut);
}

/// Creates the files that are converted.
fn create_sources(context: &Context, scenario: &Arc<Scenario>) {
    let failing = std::mem::take(&mut context.world.state().setup.failing_per_mille);
    let first = Arc::clone(scenario);
    let process = context.process(SETUP_PROCESS, move |context| {
        let Ok(engine) = context.engine(SETUP_ENGINE) else { return };
        for version in 1..=VERSIONS_MAX {
            let path = first.sources.as_ref().map(|folder| source_of(folder, version)).unwrap_or_default();
            let request = SaveRequest {
                engine: &engine,
                target: &Target::from(&path),
                seed: first.seed,
                version,
                durability: Durability::Full,
                staging: None,
                is_cancelled: false,
            };
            let written = Content::Safetensors.write(&request).and_then(|written| written.commit(Durability::Full));
            report_failure(context, written);
        }
    });
    context.join(vec![process]);
    context.world.reset_steps();
    context.world.state().setup.failing_per_mille = failing;
}

/// Creates the initial files.
fn create_initial_files(context: &Context, scenario: &Arc<Scenario>) {
    let failing = std::mem::take(&mut context.world.state().setup.failing_per_mille);
    let first = Arc::clone(scenario);
    let process = context.process(SETUP_PROCESS, move |context| {
        let Ok(engine) = context.engine(SETUP_ENGINE) else { return };
        for item in 0..first.items.len() {
            report_failure(context, save(context, &first, &engine, item, &SaveChoice::default()));
        }
    });
    context.join(vec![process]);
    context.world.reset_steps();
    context.world.state().setup.failing_per_mille = failing;
}

fn via_symlink(path: &Path) -> PathBuf {
    let disk = path.parent().and_then(Path::parent).unwrap_or(Path::new("/"));
    disk.join("link").join(path.file_name().unwrap_or_default())
}

fn item(context: &Context, folder: &Path, name: &str) -> Item {
    let path = folder.join(name);
    context.world.allow_replacing(&path);
    Item { names: vec![Target::from(&path), Target::from(via_symlink(&path))], log: Mutex::default() }
}

fn single(context: &Context, folders: &[PathBuf], rng: &mut Rng) -> Vec<Item> {
    let names: &[&str] = if rng.chance(300) { &[MODEL, "model.bin.2"] } else { &[MODEL] };
    names.iter().map(|name| item(context, &folders[0], name)).collect()
}

fn striped(context: &Context, folders: &[PathBuf], rng: &mut Rng) -> Vec<Item> {
    let parts: Vec<PathBuf> = folders.iter().map(|folder| folder.join(MODEL)).collect();
    let mut orders = vec![parts.clone()];
    if rng.chance(400) {
        // The same parts with the disks in another order: another set, with its own manifest.
        let mut other = parts;
        other.rotate_left(1);
        orders.push(other);
    }
    let mut items = Vec::new();
    for order in orders {
        let linked: Vec<PathBuf> = order.iter().map(|path| via_symlink(path)).collect();
        let sets = [StripeSet::new(order, 4096), StripeSet::new(linked, 4096)];
        let names: Vec<Target> = sets.into_iter().flatten().map(Target::Stripes).collect();
        context.world.allow_replacing(&names[0].path());
        items.push(Item { names, log: Mutex::default() });
    }
    items
}

/// Creates files of users, under names like ours.
fn create_user_files(context: &Context, scenario: &Scenario, rng: &mut Rng) {
    let names = [
        ".model.bin.deepnvme-tmp-1-0",
        ".model.bin.deepnvme-tmp-7-1a-00112233445566778899aabbccddeeff",
        ".model.bin.deepnvme-tmp-7-0-0011223344556677",
        "model.bin.part-00001-of-00002",
        "model.bin.part-1-0",
        "model.bin.stripes.json.1.tmp",
        ".model.bin.stripes.json.deepnvme-tmp-1-0",
        "model.bin.part-00112233445566778899aabbccddeeff",
        ".deepnvme-lock",
    ];
    let names_of_shards = [
        "model-00001-of-00002.safetensors",
        "model-00001-of-00001-00112233445566778899aabbccddeeff.safetensors",
        ".model.safetensors.index.json.deepnvme-tmp-1-0",
    ];
    let names = if scenario.content == Content::Shards { &names_of_shards[..] } else { &names[..] };
    for folder in &scenario.folders {
        for name in names {
            if rng.chance(500) {
                users::create_user_file(context, &folder.join(name));
            }
        }
    }
}

fn writer(context: &Context, scenario: &Arc<Scenario>, id: u32) -> thread::JoinHandle<()> {
    let scenario = Arc::clone(scenario);
    context.process(id, move |context| {
        let mut rng = context.rng(10 + u64::from(id));
        let Ok(engine) = context.engine(u64::from(id)) else { return };
        let threads = rng.within(1..4);
        let staging = scenario.staging(context, id);
        let _allowance = staging.is_some().then(|| context.world.allow_memory(POOL_BYTES_MAX));
        thread::scope(|scope| {
            for thread_index in 0..threads {
                let (scenario, engine, staging) = (&scenario, &engine, &staging);
                let started = thread::Builder::new().spawn_scoped(scope, move || {
                    let mut rng = context.rng(100 * u64::from(id) + thread_index);
                    for _ in 0..rng.within(1..4) {
                        let item = rng.below(scenario.items.len() as u64) as usize;
                        let choice = SaveChoice {
                            name: rng.below(2) as usize,
                            durability: rng.pick(scenario.durabilities),
                            is_cancelled: rng.chance(scenario.cancelled_per_mille),
                            staging: staging.clone(),
                        };
                        report_failure(context, save(context, scenario, engine, item, &choice));
                    }
                });
                debug_assert!(started.is_ok(), "threads are never short");
            }
        });
    })
}

fn reader(context: &Context, scenario: &Arc<Scenario>) -> thread::JoinHandle<()> {
    let scenario = Arc::clone(scenario);
    context.process(FIRST_USER + 1, move |context| {
        let mut rng = context.rng(2);
        let Ok(engine) = context.engine(98) else { return };
        for _ in 0..rng.within(1..5) {
            for _ in 0..rng.below(30) {
                thread::yield_now();
            }
            let item = &scenario.items[rng.below(scenario.items.len() as u64) as usize];
            let target = &item.names[rng.below(2) as usize];
            if !context.world.has_power() {
                return;
            }
            let _allowance = context.world.allow_memory(scenario.reading_bound());
            match read(&scenario, &engine, target) {
                Ok(FoundContent::Missing | FoundContent::Saved(_)) => {}
                Ok(FoundContent::Foreign(text)) => context.fail(format!("a reader sees {text}")),
                Err(_) if !context.world.has_power() => return,
                Err(error) => context.fail(format!("a reader fails: {error}")),
            }
        }
    })
}
