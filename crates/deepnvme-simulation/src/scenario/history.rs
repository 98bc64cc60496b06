//! Checkpoint folders with one writer at a time and retention. The newest committed checkpoint is always there.

mod other_processes;
mod scenario;

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use deepnvme_checkpoint::Error;
use deepnvme_checkpoint::history::{self, History, Holder, LOCK, MANIFEST, ManifestEntry};
use deepnvme_checkpoint::read::Reader;
use deepnvme_checkpoint::write::Saved;
use deepnvme_file::{Replacement, StripeSet, Target};
use deepnvme_format::checksums::Hasher;
use deepnvme_io::fs;
use deepnvme_io::{DirectMode, Durability, Engine, WriteMode, WriteOptions};
use deepnvme_simulation_runtime::thread;
use deepnvme_testkit::rng::Rng;

use super::content::{self, Content, FoundContent, SaveRequest, UncommittedSave};
use super::context::{
    CHECKPOINT_CHECK_ENGINE, Context, LAST_SAVE_ENGINE, LAST_SAVE_PROCESS, UNFINISHED_SAVE_ENGINE,
    UNFINISHED_SAVE_PROCESS,
};
use super::payload::{self, Version};
use super::unproven::may_be_foreign;
use super::users::{self, TakenNames};
use crate::world::SIMULATOR;
use crate::world::folder::Folder;
use crate::world::tree::Node;
pub(super) use scenario::Scenario;
use scenario::{Log, Save, lock};

/// Bytes of the index at a checkpoint's end. The manifest records its checksum.
const INDEX_BYTES: u64 = 8;
/// Fewer reads of a manifest than this succeed before one fails.
const MANIFEST_READS_MAX: u64 = 4;
/// Each thread of a writer makes fewer saves than this.
const SAVES_MAX: u64 = 6;

/// Runs the scenario.
pub(super) fn run(context: &Context) {
    let mut rng = context.rng(1);
    let scenario = Arc::new(make(context, &mut rng, Content::Bytes));
    // Without locks, concurrent savers are undetectable. `claim` reports that, and the user must prevent them.
    let processes = if context.world.state().setup.has_locks { rng.within(1..4) as u32 } else { 1 };
    let steps = rng.within(1..400);
    {
        let mut state = context.world.state();
        match rng.below(3) {
            0 => state.setup.power_cut_at = Some(steps),
            1 => state.setup.killed = Some((1 + rng.below(processes.into()) as u32, rng.within(1..300))),
            _ => {}
        }
    }
    let is_cut = context.world.state().setup.power_cut_at.is_some();
    check_crashes(context, &scenario);
    let mut running: Vec<_> = (1..=processes).map(|id| trainer(context, &scenario, id)).collect();
    if rng.chance(800) {
        running.push(users::start_name_taker(context, vec![scenario.folder.clone()], TakenNames::Final));
    }
    if rng.chance(700) {
        running.push(other_processes::reader(context, &scenario));
    }
    if context.rng(5).chance(300) {
        running.push(other_processes::bad_sector_injector(context, &scenario));
    }
    if context.rng(7).chance(500) {
        running.push(other_processes::checkpoint_mover(context, &scenario));
    }
    finish(context, &scenario, running, is_cut);
}

/// Creates a folder with files of users.
pub(super) fn make(context: &Context, rng: &mut Rng, content: Content) -> Scenario {
    let folder = make_folder(context);
    let keep = rng.pick(&[None, Some(1), Some(2), Some(3)]);
    let scenario = Scenario { content, folder, seed: rng.next_u64(), keep, log: Mutex::default() };
    for name in USER_FILES {
        if rng.chance(400) {
            users::create_user_file(context, &scenario.folder.join(name));
        }
    }
    scenario
}

/// Checks crash states at some moments.
pub(super) fn check_crashes(context: &Context, scenario: &Arc<Scenario>) {
    let scenario = Arc::clone(scenario);
    context.check_crashes(300, 2, move || {
        let seen = scenario.copy();
        move |context: &Context, is_cut| check_end(context, &Arc::new(seen.copy()), is_cut)
    });
}

/// Waits for all processes, and checks the result.
pub(super) fn finish(context: &Context, scenario: &Arc<Scenario>, running: Vec<thread::JoinHandle<()>>, is_cut: bool) {
    context.finish_running(running, is_cut);
    check_end(context, scenario, is_cut);
}

/// Checks the state after all processes ended or the power was cut, and the next process that uses it.
fn check_end(context: &Context, scenario: &Arc<Scenario>, is_cut: bool) {
    if is_cut {
        // The power cut may have undone the edit, or the way back.
        lock(&scenario.log).returned.clear();
    }
    check(context, scenario, is_cut, "afterwards");
    save_with_unreadable_manifest(context, scenario);
    check(context, scenario, is_cut, "after a save that could not read the manifest");
    save_again(context, scenario);
    users::check_user_files(context);
}

const USER_FILES: [&str; 9] = [
    "step-00000001.pt",
    "step-00000002-1.pt",
    "step-00000003",
    "step-00000004.safetensors",
    "step-00000099.pt",
    ".step-00000001.pt.deepnvme-tmp-7-1a-0011223344556677",
    ".manifest.json.deepnvme-tmp-7-0-0011223344556677",
    ".deepnvme-lock.tmp",
    "manifest.json.bak",
];

fn make_folder(context: &Context) -> PathBuf {
    let path = PathBuf::from("/d0/run");
    let mut state = context.world.state();
    let tree = &mut state.tree;
    let made = tree.find(&path, false).and_then(|place| {
        let inode = tree.make(Node::Folder(Folder::default()), 0, 0o755, true)?;
        tree.set_names(place.folder, vec![(place.name, Some(inode))]);
        let all = tree.last_change();
        tree.sync(place.folder, &[], all)
    });
    debug_assert!(made.is_ok(), "an empty disk has space");
    path
}

/// Starts a process with one history, into which one to three of its threads save.
fn trainer(context: &Context, scenario: &Arc<Scenario>, id: u32) -> thread::JoinHandle<()> {
    let scenario = Arc::clone(scenario);
    context.process(id, move |context| {
        let mut rng = context.rng(10 + u64::from(id));
        let Ok(engine) = context.engine(u64::from(id)) else { return };
        let history = History::new(scenario.folder.clone(), scenario.keep, true);
        let threads = rng.within(1..4);
        thread::scope(|scope| {
            for index in 0..threads {
                let (scenario, engine, history) = (&scenario, &engine, &history);
                let started = thread::Builder::new().spawn_scoped(scope, move || {
                    let mut rng = context.rng(100 * u64::from(id) + index);
                    for _ in 0..rng.within(1..SAVES_MAX) {
                        let step = rng.within(1..9);
                        let durability = rng.pick(&[Durability::Data, Durability::Full, Durability::Full]);
                        let saved = save(scenario, engine, history, id, step, durability);
                        match saved {
                            Err(Error::Locked { .. }) if context.world.state().setup.has_locks => thread::yield_now(),
                            outcome => report_failure(context, outcome),
                        }
                    }
                });
                debug_assert!(started.is_ok(), "threads are never short");
            }
        });
        drop(history);
    })
}

fn report_failure(context: &Context, outcome: Result<(), Error>) {
    let Err(error) = outcome else { return };
    let is_dead = context.world.is_dead(thread::process());
    let state = context.world.state();
    let is_excused = is_dead || state.setup.failing_per_mille > 0 || state.bad_reads > 0;
    drop(state);
    if !is_excused {
        context.fail(format!("a save failed, though nothing else did: {error}"));
    }
}

/// Saves as a `Checkpointer` does.
fn save(
    scenario: &Scenario,
    engine: &Arc<Engine>,
    history: &History,
    id: u32,
    step: u64,
    durability: Durability,
) -> Result<(), Error> {
    let holder = Holder::new(format!("process {id}"), format!("{id}"));
    history.claim(&holder, true)?;
    let name = history.reserve(step, ".pt", &[])?;
    let path = history.folder().join(&name);
    let version = lock(&scenario.log).next_version + 1;
    scenario.begin_save(version, step, durability);
    let saved = (|| {
        if scenario.content != Content::Bytes {
            let (seed, staging, target) = (scenario.seed, None, Target::Path(path));
            let request =
                SaveRequest { engine, target: &target, seed, version, durability, staging, is_cancelled: false };
            let UncommittedSave::File(replacement, Some(saved)) = scenario.content.write(&request)? else {
                return Ok(());
            };
            return history.commit(entry_of(&name, step, saved), Some(replacement), &[]).map(drop);
        }
        let replacement = Replacement::new(&Target::Path(path))?;
        let bytes = payload::content(scenario.seed, version);
        let entry = entry(&name, step, &bytes);
        let file = replacement.open(DirectMode::Preferred)?;
        let options = WriteOptions { durability, mode: WriteMode::WholeFile };
        engine.write(&file, 0, payload::region_with(&bytes).region(), options)?.wait().1?;
        drop(file);
        history.commit(entry, Some(replacement), &[]).map(drop)
    })();
    if saved.is_err() {
        history.release_name(&name);
    }
    scenario.end_save(version, saved.is_ok());
    saved
}

/// Returns the manifest entry of a saved file.
pub(super) fn entry_of(name: &str, step: u64, saved: Saved) -> ManifestEntry {
    ManifestEntry {
        nbytes: saved.bytes,
        index_offset: saved.index_offset,
        index_nbytes: saved.index_bytes,
        index_crc64: format!("{:016x}", saved.index_crc64),
        ..entry(name, step, &[0; INDEX_BYTES as usize])
    }
}

fn entry(name: &str, step: u64, bytes: &[u8]) -> ManifestEntry {
    let index = bytes.len() as u64 - INDEX_BYTES;
    let mut hasher = Hasher::default();
    hasher.update(&bytes[index as usize..]);
    ManifestEntry {
        file: name.into(),
        step,
        nbytes: bytes.len() as u64,
        index_offset: index,
        index_nbytes: INDEX_BYTES,
        index_crc64: format!("{:016x}", hasher.finish().crc64),
        ..ManifestEntry::default()
    }
}

/// Returns the newest checkpoint, as a restart finds it.
fn newest(context: &Context, scenario: &Scenario) -> Result<Option<(u64, FoundContent)>, Error> {
    let history = History::new(scenario.folder.clone(), scenario.keep, true);
    let manifest = history.read()?;
    let Some(entry) = manifest.checkpoints.last() else { return Ok(None) };
    Ok(Some((entry.step, read_checkpoint(context, scenario, entry)?)))
}

/// Reads a checkpoint under its final or private name.
fn read_checkpoint(context: &Context, scenario: &Scenario, entry: &ManifestEntry) -> Result<FoundContent, Error> {
    let path_of = |name: &String| history::find_file(&scenario.folder, name, entry);
    if scenario.content == Content::Bytes {
        let bytes = fs::read_small(&path_of(&entry.file), 1 << 20)?;
        let path = scenario.folder.join(&entry.file);
        let moved = || lock(&scenario.log).moved.iter().find(|(_, moved)| **moved == path).map(|(version, _)| *version);
        let version = payload::recognise(scenario.seed, &bytes).or_else(moved);
        return Ok(version.map_or_else(|| FoundContent::Foreign("other bytes".into()), FoundContent::Saved));
    }
    let engine = context.engine(CHECKPOINT_CHECK_ENGINE)?;
    let target = match entry.parts.as_slice() {
        [] => Target::Path(path_of(&entry.file)),
        parts => {
            let row = parts[0].nbytes.next_multiple_of(4096);
            Target::Stripes(StripeSet::new(parts.iter().map(|part| path_of(&part.file)).collect(), row)?)
        }
    };
    let reader = Reader::open(&engine, &target)?;
    let crc64 = reader.index_crc64(&engine)?;
    if reader.file_bytes() != entry.nbytes || format!("{crc64:016x}") != entry.index_crc64 {
        return Ok(FoundContent::Foreign("another file than the manifest says".into()));
    }
    Ok(content::recognise(scenario.seed, &content::load(&engine, reader)?))
}

/// Starts a save while the manifest is unreadable. It may fail, but committed checkpoints stay.
fn save_with_unreadable_manifest(context: &Context, scenario: &Arc<Scenario>) {
    let again = Arc::clone(scenario);
    let reads = context.world.state().rng().below(MANIFEST_READS_MAX);
    let process = context.process(UNFINISHED_SAVE_PROCESS, move |context| {
        let Ok(engine) = context.engine(UNFINISHED_SAVE_ENGINE) else { return };
        let history = History::new(again.folder.clone(), again.keep, true);
        context.world.make_unreadable(&history.folder().join(MANIFEST), reads);
        report_failure(context, save(&again, &engine, &history, UNFINISHED_SAVE_PROCESS, 19, Durability::Full));
    });
    context.join(vec![process]);
    context.world.stop_faults();
}

/// Checks that the newest checkpoint is complete and no committed one is missing.
fn check(context: &Context, scenario: &Arc<Scenario>, after_cut: bool, when: &str) {
    debug_assert_eq!(thread::process(), SIMULATOR, "nothing may fail here");
    let log = lock(&scenario.log).clone();
    let must_remain = |(version, save): &(&Version, &Save)| {
        save.is_committed && (!after_cut || save.durability >= Durability::Data) && !log.moved.contains_key(version)
    };
    for path in log.returned.iter().filter(|path| fs::stat_link(path).is_err()) {
        context.fail(format!("{when}: {} was moved back, and removed", path.display()));
    }
    match newest(context, scenario) {
        Err(error) => context.fail(format!("{when}: the newest cannot be read: {error}")),
        Ok(None) => {
            // A version that was moved away may have replaced all others.
            let must_remain = log.saves.iter().find(must_remain).filter(|_| log.moved.is_empty());
            if let Some((version, _)) = must_remain {
                context.fail(format!("{when}: nothing counts, though version {version} was saved"));
            }
        }
        Ok(Some((_, FoundContent::Missing | FoundContent::Foreign(_)))) => {
            context.fail(format!("{when}: the newest is not whole"));
        }
        Ok(Some((step, FoundContent::Saved(version)))) => {
            let Some(found) = log.saves.get(&version) else {
                return context.fail(format!("{when}: version {version} counts, which nobody saved"));
            };
            if found.step != step {
                context.fail(format!("{when}: version {version} of step {} counts as step {step}", found.step));
            }
        }
    }
    let Ok(manifest) = History::new(scenario.folder.clone(), scenario.keep, true).read() else { return };
    if scenario.keep.is_some_and(|keep| manifest.checkpoints.len() > keep.max(1)) {
        context.fail(format!("{when}: {} checkpoints count, of {:?}", manifest.checkpoints.len(), scenario.keep));
    }
    let mut versions = Vec::new();
    for entry in &manifest.checkpoints {
        match read_checkpoint(context, scenario, entry) {
            Ok(FoundContent::Saved(version)) => versions.push(version),
            Ok(other) => context.fail(format!("{when}: {} is not whole: {other:?}", entry.file)),
            Err(error) => context.fail(format!("{when}: {} counts, and cannot be read: {error}", entry.file)),
        }
    }
    check_last(context, &log, &versions, after_cut, when);
}

/// Checks that the last save without a successor counts.
fn check_last(context: &Context, log: &Log, found: &[Version], after_cut: bool, when: &str) {
    for (version, save) in
        log.saves.iter().filter(|(version, save)| save.is_committed && !log.moved.contains_key(version))
    {
        // A save that neither counts nor was ever there has replaced nothing.
        let is_nothing =
            |other: &Version, it: &Save| !it.is_committed && !found.contains(other) && !log.moved.contains_key(other);
        let is_before = |it: &Save| it.ended.is_some_and(|end| end < save.began);
        let is_last = log.saves.iter().all(|(other, it)| other == version || is_before(it) || is_nothing(other, it));
        if is_last && !found.contains(version) && !(after_cut && save.durability < Durability::Data) {
            context.fail(format!("{when}: version {version} of step {} was saved last, and does not count", save.step));
        }
    }
}

/// Saves twice more, without faults: both succeed, and leave only files of ours that the manifest lists.
fn save_again(context: &Context, scenario: &Arc<Scenario>) {
    let again = Arc::clone(scenario);
    let process = context.process(LAST_SAVE_PROCESS, move |context| {
        let Ok(engine) = context.engine(LAST_SAVE_ENGINE) else { return };
        let history = History::new(again.folder.clone(), again.keep, true);
        for step in [20, 21] {
            report_failure(context, save(&again, &engine, &history, LAST_SAVE_PROCESS, step, Durability::Full));
        }
    });
    context.join(vec![process]);
    check(context, scenario, false, "after the next save");
    if !context.world.state().setup.has_locks {
        return;
    }
    let Ok(manifest) = History::new(scenario.folder.clone(), scenario.keep, true).read() else { return };
    for path in users::own_files_in(context, &scenario.folder) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        // The lock file may stay: any process can lock it again.
        let is_known = manifest.names().contains(name.as_str())
            || name == MANIFEST
            || name == LOCK
            || lock(&scenario.log).moved.values().any(|moved| *moved == path);
        if !is_known && !may_be_foreign(context, &path) {
            context.fail(format!("{} is left behind", path.display()));
        }
    }
}
