//! Saves in which some consecutive calls fail, at every point. The next save cleans up and loses nothing.
#![cfg(simulated)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "these are tests")]

use std::ops::Range;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use deepnvme_checkpoint::history::{
    self, History, Holder, LOCK, MANIFEST, ManifestEntry, PARTS_LIST, Part, SHARDS_LIST,
};
use deepnvme_checkpoint::write::{Save, SaveOptions, Staging, Tensor};
use deepnvme_file::replace::{Member, PrivateFolder, SetReplacement, UNPROVEN_MARKER, retire_set};
use deepnvme_file::{Replacement, Target};
use deepnvme_format::Dtype;
use deepnvme_format::checksums::checksums_of;
use deepnvme_format::file_list::FILES_KEY;
use deepnvme_format::safetensors::TensorSpec;
use deepnvme_io::Result;
use deepnvme_io::fs::{self, OFlags};
use deepnvme_io::mem::Region;
use deepnvme_simulation::run::script;
use deepnvme_simulation::scenario::Context;
use deepnvme_simulation::world::tree::{Losses, NameLosses};
use deepnvme_simulation::world::{FIRST_USER, FaultTrigger, Setup};
use deepnvme_simulation_runtime::thread::in_process;
use serde_json::{Value, json};

const FOLDER: &str = "/d0";
/// Members of sets are on another disk than their index: a sync of one does not cover the other.
const MEMBERS: &str = "/d1";
/// Maximum consecutive calls that fail.
const REFUSED_MAX: u64 = 3;
/// Calls from the middle of a save to a little after its end.
const LATE_CALLS: Range<u64> = 28..72;
/// The second process dies at one of this number of its first calls.
const SECOND_CALLS: u64 = 20;

/// Lose everything that is not durable.
const LOSSES: Losses = Losses { kept_per_mille: 0, names: NameLosses::Any };

fn setup(has_unnamed: bool) -> Setup {
    Setup {
        disks: 2,
        has_unnamed,
        has_locks: true,
        has_birth_times: true,
        has_direct: false,
        failing_per_mille: 0,
        losses: LOSSES,
        power_cut_at: None,
        killed: None,
        fault_trigger: FaultTrigger::Steps,
    }
}

/// Runs `work` with each range of its calls failing, between `before` and `after`, in which nothing fails.
fn with_each_refused<T: 'static>(
    before: fn(&Context) -> T,
    work: fn(&Context, &mut T),
    after: fn(&Context, T),
    calls_min: u64,
) {
    for has_unnamed in [true, false] {
        for count in 1..=REFUSED_MAX {
            for from in 0.. {
                let calls = Arc::new(AtomicU64::new(0));
                let counted = Arc::clone(&calls);
                let report = script(7, &setup(has_unnamed), move |context| {
                    let mut state = in_process(1, || before(context));
                    context.world.fail_calls(from..from + count);
                    in_process(1, || work(context, &mut state));
                    counted.store(context.world.calls(), Ordering::Relaxed);
                    context.world.stop_faults();
                    after(context, state);
                });
                let failures = report.failures;
                assert!(failures.is_empty(), "unnamed {has_unnamed}, {count} from {from}: {failures:#?}");
                if from > calls.load(Ordering::Relaxed) {
                    assert!(from > calls_min, "only {from} calls");
                    break;
                }
            }
        }
    }
}

/// Lists the names in both folders. Leaves out files that could neither get a name that states their inode
/// nor be removed.
fn names() -> Vec<String> {
    let names = [FOLDER, MEMBERS].map(|folder| fs::entries(Path::new(folder)).unwrap());
    let names = names.into_iter().flatten().map(|name| name.into_string().unwrap());
    names.filter(|name| !name.contains(UNPROVEN_MARKER)).collect()
}

fn write(path: &Path, text: &str, is_new: bool) -> Result<()> {
    let flags = if is_new { OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL } else { OFlags::WRONLY };
    let written = fs::open(path, flags, 0o600).and_then(|file| {
        fs::write_all(file.as_fd(), text.as_bytes())?;
        fs::sync(file.as_fd())
    });
    written.map_err(|errno| deepnvme_io::Error::os("write", errno).at_path(path))
}

fn begin() -> Result<SetReplacement> {
    let member = |name: &str| Member { prefix: Path::new(MEMBERS).join(name), suffix: ".bin".into() };
    SetReplacement::begin(&Path::new(FOLDER).join("index.json"), &[member("one-"), member("two-")], &["files"])
}

fn commit(new: SetReplacement, text: &str) -> Result<()> {
    for member in new.members() {
        write(member, text, false)?;
    }
    let names = new.names().map(|path| format!("..{}", path.to_str().unwrap()));
    let map: serde_json::Map<String, Value> = names.map(|name| (name.clone(), name.into())).collect();
    new.commit(json!({"weight_map": map})).map(drop)
}

fn set_text() -> String {
    let index: Value =
        serde_json::from_slice(&fs::read_small(&Path::new(FOLDER).join("index.json"), 1 << 20).unwrap()).unwrap();
    let members = index["weight_map"].as_object().unwrap().keys();
    let texts: Vec<_> = members.map(|name| fs::read_small(&Path::new(FOLDER).join(name), 1 << 20).unwrap()).collect();
    assert!(texts.len() == 2 && texts[0] == texts[1], "{texts:?}");
    String::from_utf8(texts[0].clone()).unwrap()
}

#[test]
fn a_set_whose_save_is_refused_anything_gives_its_names_back_for_good() {
    let before = |_: &Context| {
        commit(begin().unwrap(), "old").unwrap();
        (Vec::<PathBuf>::new(), false)
    };
    let give_up = |_: &Context, (names, _): &mut (Vec<PathBuf>, bool)| {
        if let Ok(new) = begin() {
            names.extend(new.names().chain(new.members()).map(PathBuf::from));
        }
    };
    let save = |_: &Context, (names, is_saved): &mut (Vec<PathBuf>, bool)| {
        if let Ok(new) = begin() {
            names.extend(new.names().chain(new.members()).map(PathBuf::from));
            *is_saved = commit(new, "new").is_ok();
        }
    };
    let after = |_: &Context, (names, is_saved): (Vec<PathBuf>, bool)| {
        let shown = set_text();
        assert!(shown == "new" || (shown == "old" && !is_saved), "{shown}");
        let mut theirs = 0;
        in_process(FIRST_USER, || {
            for path in names.iter().filter(|path| !fs::exists(path).unwrap()) {
                write(path, "theirs", true).unwrap();
                theirs += 1;
            }
        });
        in_process(1, || commit(begin().unwrap(), "next").unwrap());
        assert_eq!(set_text(), "next");
        assert_eq!(self::names().len(), 3 + theirs, "{:?}", self::names());
    };
    with_each_refused(before, give_up, after, 10);
    with_each_refused(before, save, after, 20);
}

#[test]
fn a_set_that_is_retired_takes_what_earlier_ones_could_not_remove_with_it() {
    let retire = || retire_set(&Path::new(FOLDER).join("index.json"), &["files"]);
    for late in LATE_CALLS {
        for from in 0.. {
            let calls = Arc::new(AtomicU64::new(0));
            let counted = Arc::clone(&calls);
            let report = script(7, &setup(true), move |context| {
                in_process(1, || commit(begin().unwrap(), "old").unwrap());
                context.world.fail_calls(late..late + 1);
                in_process(1, || begin().and_then(|new| commit(new, "new")).unwrap_or_default());
                context.world.stop_faults();
                context.world.fail_calls(from..from + 1);
                in_process(2, || drop(retire()));
                counted.store(context.world.calls(), Ordering::Relaxed);
                context.world.stop_faults();
                in_process(3, || _ = retire().unwrap());
                assert_eq!(names(), Vec::<String>::new());
            });
            assert!(report.failures.is_empty(), "{late}, {from}: {:#?}", report.failures);
            if from > calls.load(Ordering::Relaxed) {
                assert!(from > 10, "only {from} calls");
                break;
            }
        }
    }
}

/// Cuts the power, and restarts. The losses of the setup decide which non-durable changes remain.
fn cut_power(context: &Context) {
    context.world.cut_power();
    context.world.restart().unwrap();
}

/// Kills a first process late in its work or at its end, a second at some call after that, then cuts the power.
fn with_both_killed(before: fn(), first: fn(), second: fn(), after: fn(&Context)) {
    let calls = Arc::new(AtomicU64::new(0));
    for first_call in LATE_CALLS {
        for second_call in 0..SECOND_CALLS {
            let (setup, counted) =
                (Setup { losses: Losses { kept_per_mille: 500, ..LOSSES }, ..setup(true) }, Arc::clone(&calls));
            let report = script(first_call * 1000 + second_call, &setup, move |context| {
                in_process(1, before);
                context.world.fail_calls(first_call..u64::MAX);
                in_process(1, first);
                counted.store(context.world.calls(), Ordering::Relaxed);
                context.world.fail_calls(second_call..u64::MAX);
                in_process(2, second);
                context.world.stop_faults();
                cut_power(context);
                after(context);
            });
            assert!(report.failures.is_empty(), "{first_call}, then {second_call}: {:#?}", report.failures);
        }
    }
    assert!(calls.load(Ordering::Relaxed) < LATE_CALLS.end, "the first always dies");
}

#[test]
fn a_set_that_a_power_cut_brings_back_is_whole() {
    let after = |_: &Context| {
        assert!(["old", "new"].contains(&set_text().as_str()));
        in_process(3, || commit(begin().unwrap(), "next").unwrap());
        assert_eq!(set_text(), "next");
    };
    let first = || {
        let _ = begin().and_then(|new| commit(new, "new"));
    };
    with_both_killed(|| commit(begin().unwrap(), "old").unwrap(), first, || drop(begin()), after);
}

fn save(history: &History, step: u64, text: &str) -> deepnvme_checkpoint::Result<()> {
    history.claim(&Holder::new("a test".into(), "group".into()), true)?;
    let name = history.reserve(step, ".pt", &[])?;
    let saved = (|| {
        let new = Replacement::new(&Target::Path(history.folder().join(&name)))?;
        write(&new.temporary().path(), text, false)?;
        history.commit(entry(&name, step, text, Vec::new()), Some(new), &[]).map(drop)
    })();
    if saved.is_err() {
        history.release_name(&name);
    }
    saved
}

fn entry(name: &str, step: u64, text: &str, parts: Vec<Part>) -> ManifestEntry {
    ManifestEntry {
        file: name.to_owned(),
        step,
        nbytes: text.len() as u64,
        index_nbytes: text.len() as u64,
        index_crc64: crc64(text),
        parts,
        ..ManifestEntry::default()
    }
}

fn crc64(text: &str) -> String {
    format!("{:016x}", checksums_of(text.as_bytes()).crc64)
}

/// Saves a checkpoint of one part and its list.
fn save_part(history: &History, step: u64, text: &str) {
    history.claim(&Holder::new("a test".into(), "group".into()), true).unwrap();
    let list = history.reserve(step, &format!(".pt{PARTS_LIST}"), &[]).unwrap();
    let file = format!("{}.part-00-of-01", list.strip_suffix(PARTS_LIST).unwrap());
    write(&history.folder().join(&file), text, true).unwrap();
    write(&history.folder().join(&list), &json!({"parts": [file]}).to_string(), true).unwrap();
    let part =
        Part { file, nbytes: text.len() as u64, host: "here".into(), head_crc64: Some(crc64(text)), written_ns: None };
    history.commit(entry(&list, step, text, vec![part]), None, &[]).unwrap();
}

/// Saves a checkpoint of one shard in a folder.
fn save_shard(history: &History, step: u64, text: &str) {
    const SHARD: &str = "shard-00000-0123456789abcdef.safetensors";
    history.claim(&Holder::new("a test".into(), "group".into()), true).unwrap();
    let name = history.reserve(step, "", &[]).unwrap();
    let folder = history.folder().join(&name);
    fs::make_folder(&folder, 0o700).unwrap();
    let header_bytes = (text.len() as u64).to_le_bytes();
    let shard = [header_bytes.as_slice(), text.as_bytes()].concat();
    let file = fs::open(&folder.join(SHARD), OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL, 0o600).unwrap();
    fs::write_all(file.as_fd(), &shard).unwrap();
    let fingerprint = json!({"bytes": shard.len(), "index_crc64": format!("{:016x}", checksums_of(&shard).crc64)});
    let index = json!({"entries": {"a": {"bytes": [SHARD, "a"]}}, FILES_KEY: {SHARD: fingerprint}}).to_string();
    write(&folder.join(SHARDS_LIST), &index, true).unwrap();
    history.commit(entry(&name, step, &index, Vec::new()), None, &[]).unwrap();
}

/// Returns the text of each committed checkpoint.
fn counted() -> Vec<String> {
    let manifest = History::new(FOLDER.into(), Some(1), true).read().unwrap();
    let text = |entry: &ManifestEntry| {
        let names = std::iter::once(&entry.file).chain(entry.pending.get(&entry.file));
        let found = names.filter_map(|name| fs::read_small(&Path::new(FOLDER).join(name), 1 << 20).ok()).next();
        String::from_utf8(found.unwrap_or_else(|| panic!("{} counts, and is not there", entry.file))).unwrap()
    };
    manifest.checkpoints.iter().map(text).collect()
}

#[test]
fn a_checkpoint_that_a_power_cut_brings_back_is_there() {
    fn saved(step: u64, text: &str) -> deepnvme_checkpoint::Result<()> {
        save(&History::new(FOLDER.into(), Some(1), true), step, text)
    }
    // The next process settles the folder before it saves.
    let second = || {
        let history = History::new(FOLDER.into(), Some(1), true);
        if history.claim(&Holder::new("a test".into(), "group".into()), true).is_ok() {
            history.settle();
        }
    };
    let after = |_: &Context| {
        let shown = counted();
        assert!(shown == ["old"] || shown == ["new"], "{shown:?}");
    };
    let first = || drop(saved(2, "new"));
    with_both_killed(|| saved(1, "old").unwrap(), first, second, after);
}

#[test]
fn a_checkpoint_that_may_count_is_never_removed_by_the_next_save() {
    let before = |_: &Context| {
        let history = History::new(FOLDER.into(), Some(1), true);
        save(&history, 1, "old").unwrap();
        (history, false)
    };
    let work = |_: &Context, (history, is_saved): &mut (History, bool)| *is_saved = save(history, 2, "new").is_ok();
    let after = |_: &Context, (history, is_saved): (History, bool)| {
        let shown = counted();
        assert!(shown == ["new"] || (shown == ["old"] && !is_saved), "{shown:?}");
        // The next save of the same step starts, and is given up.
        let name = in_process(1, || history.reserve(2, ".pt", &[])).unwrap();
        in_process(1, || drop(Replacement::new(&Target::Path(history.folder().join(&name))).unwrap()));
        history.release_name(&name);
        assert_eq!(counted(), shown, "after a save that was given up");
        in_process(1, || save(&history, 2, "next")).unwrap();
        assert_eq!(counted(), ["next"]);
        in_process(1, || drop(history));
        in_process(2, || save(&History::new(FOLDER.into(), Some(1), true), 3, "last")).unwrap();
        assert_eq!(counted(), ["last"]);
        let left = names();
        let is_known = |name: &String| [MANIFEST, LOCK, "step-00000003.pt"].contains(&name.as_str());
        assert!(left.iter().all(is_known), "{left:?}");
    };
    with_each_refused(before, work, after, 20);
}

/// A claim that fails holds no lock, so the next one cleans up.
#[test]
fn a_claim_after_a_failed_one_removes_leftovers() {
    let before = |context: &Context| {
        let folder = history::PrivateFolder::new(Path::new(FOLDER), "step-00000001").unwrap();
        context.world.fail_calls(0..u64::MAX);
        drop(folder);
        context.world.stop_faults();
        History::new(FOLDER.into(), Some(1), true)
    };
    let work = |_: &Context, history: &mut History| {
        let claimed = history.claim(&Holder::new("a test".into(), "group".into()), true);
        assert_eq!(history.is_claimed(), claimed.is_ok());
    };
    let after = |_: &Context, history: History| {
        let is_claimed = history.is_claimed();
        in_process(1, || save(&history, 2, "new")).unwrap();
        assert!(is_claimed || !names().iter().any(|name| name.starts_with(".step-00000001")));
    };
    with_each_refused(before, work, after, 8);
}

/// A file that cannot be read for a moment is not somebody else's.
#[test]
fn a_retired_checkpoint_of_several_files_is_removed_in_the_end() {
    fn removed(_: &Context, history: History) {
        in_process(1, || save(&history, 3, "last")).unwrap();
        in_process(1, || drop(history));
        let left = names();
        let inside = fs::entries(&Path::new(FOLDER).join("step-00000001"));
        assert!(!left.iter().any(|name| name.contains("step-00000001")), "{left:?} {inside:?}");
    }
    fn saved(save_first: fn(&History, u64, &str)) -> History {
        let history = History::new(FOLDER.into(), Some(1), true);
        save_first(&history, 1, "old");
        history
    }
    let work = |_: &Context, history: &mut History| drop(save(history, 2, "new"));
    with_each_refused(|_: &Context| saved(save_part), work, removed, 20);
    with_each_refused(|_: &Context| saved(save_shard), work, removed, 20);
}

/// A killed save's shard folder: files of the save are removed, and all others stay, whatever their names.
#[test]
fn what_others_put_into_the_folder_of_a_killed_save_stays() {
    const FOREIGN: [&str; 4] = [
        "notes.txt",
        ".deepnvme.json.deepnvme-tmp-1-0-0011223344556677",
        "shard-00000-0.safetensors",
        "deepnvme.json.bak",
    ];
    let make = |is_committed: bool| {
        let folder = history::PrivateFolder::new(Path::new(FOLDER), "step-00000001").unwrap();
        let index = folder.path().join("deepnvme.json");
        let member = |number| Member { prefix: folder.path().join(format!("shard-{number}-")), suffix: ".bin".into() };
        let new = SetReplacement::begin(&index, &[member(0), member(1)], &["deepnvme.owned"]).unwrap();
        new.members().for_each(|path| write(path, "shard", false).unwrap());
        let left = if is_committed { new.commit(json!({})).map(|_| None).unwrap() } else { Some(new) };
        (folder, left)
    };
    for (is_committed, foreign) in [(false, 0), (true, 0), (false, FOREIGN.len()), (true, FOREIGN.len())] {
        let report = script(5, &setup(true), move |context| {
            let (folder, new) = in_process(1, || make(is_committed));
            let path = folder.path().to_path_buf();
            in_process(FIRST_USER, || {
                FOREIGN[..foreign].iter().for_each(|name| write(&path.join(name), "theirs", true).unwrap());
            });
            // The process dies: its remaining calls have no effect.
            context.world.fail_calls(0..u64::MAX);
            in_process(1, || drop((new, folder)));
            context.world.stop_faults();
            assert!(fs::entries(&path).unwrap().len() > foreign, "the killed save left something");
            let history = History::new(FOLDER.into(), Some(1), true);
            in_process(2, || history.claim(&Holder::new("a test".into(), "group".into()), true).map(drop).unwrap());
            let mut left: Vec<_> = fs::entries(&path).unwrap_or_default();
            left.sort();
            let mut expected: Vec<_> = FOREIGN[..foreign].to_vec();
            expected.sort_unstable();
            assert_eq!(left, expected, "committed {is_committed}");
            assert_eq!(fs::exists(&path).unwrap(), foreign > 0, "an empty folder goes");
        });
        assert!(report.failures.is_empty(), "committed {is_committed}, {foreign} foreign: {:#?}", report.failures);
    }
}

/// Pieces that will never be written release their memory to waiting threads.
#[test]
fn a_save_whose_writes_fail_ends() {
    let failed = Arc::new(AtomicU64::new(0));
    for seed in 0..400 {
        let counted = Arc::clone(&failed);
        let report = script(seed, &setup(true), move |context| {
            context.world.fail_calls(20 + seed % 40..u64::MAX);
            let outcome = in_process(1, || {
                let path = Path::new(FOLDER).join("model.safetensors");
                let spec = TensorSpec { name: "t".into(), dtype: Dtype::U8, shape: vec![400_000] };
                let tensor = Tensor { spec, data: Region::from_vec(vec![7; 400_000]).into() };
                let options = SaveOptions { staging: Staging::new(1).ok(), ..SaveOptions::default() };
                let save = Save::safetensors(&path, vec![tensor], Vec::new(), options).unwrap();
                save.run(context.engine(1).unwrap(), &Target::Path(path), Arc::default())
            });
            counted.fetch_add(u64::from(outcome.is_err()), Ordering::Relaxed);
        });
        assert!(report.failures.is_empty(), "seed {seed}: {:#?}", report.failures);
    }
    assert!(failed.load(Ordering::Relaxed) > 100, "only {failed:?} saves met a failure");
}

/// Files in a new folder, after a power cut at any point.
#[test]
fn a_folder_that_a_power_cut_ends_leaves_nothing() {
    const FILES: [&str; 2] = ["one", "two"];
    const CUTS: u64 = 30;
    let make = |is_given_up: bool| -> Result<()> {
        let mut new = PrivateFolder::new(&Path::new(FOLDER).join("model"))?;
        for name in FILES {
            write(&new.add(Path::new(name))?, name, true)?;
        }
        if is_given_up { Ok(()) } else { new.commit() }
    };
    let calls = Arc::new(AtomicU64::new(0));
    for call in 0..CUTS {
        for seed in 0..20 {
            let setup = Setup { losses: Losses { kept_per_mille: 500, ..LOSSES }, ..setup(true) };
            let counted = Arc::clone(&calls);
            let report = script(call * 1000 + seed, &setup, move |context| {
                context.world.fail_calls(call..u64::MAX);
                let _ = in_process(1, || make(false));
                counted.store(context.world.calls(), Ordering::Relaxed);
                context.world.stop_faults();
                cut_power(context);
                let shown = |names: Vec<String>| if names.is_empty() { "nothing".into() } else { names.join(", ") };
                let is_there = names().contains(&"model".into());
                in_process(2, || make(true)).unwrap();
                assert_eq!(shown(names()), if is_there { "model" } else { "nothing" }, "seed {seed}");
            });
            assert!(report.failures.is_empty(), "cut at call {call}: {:#?}", report.failures);
        }
    }
    assert!(calls.load(Ordering::Relaxed) < CUTS, "the last cuts come after the end");
}
