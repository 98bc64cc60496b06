//! Some consecutive calls of a save fail, at every point.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use deepnvme_checkpoint::history::{self, History, Holder, LOCK, MANIFEST};
use deepnvme_checkpoint::write::{Save, SaveOptions, Staging, Tensor};
use deepnvme_file::replace::{PrivateFolder, retire_set};
use deepnvme_file::{Replacement, Target};
use deepnvme_format::Dtype;
use deepnvme_format::safetensors::TensorSpec;
use deepnvme_io::fs;
use deepnvme_io::mem::Region;
use deepnvme_simulation::run::script;
use deepnvme_simulation::scenario::Context;
use deepnvme_simulation::world::FIRST_USER;
use deepnvme_simulation_runtime::thread::in_process;
use serde_json::json;

use crate::setup::{
    FOLDER, LATE_CALLS, begin, commit, committed_texts, names, save, save_part, save_shard, set_text, setup, write,
};

/// Maximum consecutive calls that fail.
const REFUSED_MAX: u64 = 3;

/// Runs `work` with each range of its calls failing, between `before` and `after`, in which nothing fails.
fn with_each_failing_call<T: 'static>(
    before: fn(&Context) -> T,
    work: fn(&Context, &mut T),
    after: fn(&Context, T),
    calls_min: u64,
) {
    for has_unnamed in [true, false] {
        for count in 1..=REFUSED_MAX {
            for from in 0.. {
                let calls = Arc::new(AtomicU64::new(0));
                let call_count = Arc::clone(&calls);
                let report = script(7, &setup(has_unnamed), move |context| {
                    let mut state = in_process(1, || before(context));
                    context.world.fail_calls(from..from + count);
                    in_process(1, || work(context, &mut state));
                    call_count.store(context.world.calls(), Ordering::Relaxed);
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

#[test]
fn a_failed_save_of_a_set_releases_its_names() {
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
    with_each_failing_call(before, give_up, after, 10);
    with_each_failing_call(before, save, after, 20);
}

#[test]
fn retiring_a_set_removes_earlier_leftovers() {
    let retire = || retire_set(&Path::new(FOLDER).join("index.json"), &["files"]);
    for late in LATE_CALLS {
        for from in 0.. {
            let calls = Arc::new(AtomicU64::new(0));
            let call_count = Arc::clone(&calls);
            let report = script(7, &setup(true), move |context| {
                in_process(1, || commit(begin().unwrap(), "old").unwrap());
                context.world.fail_calls(late..late + 1);
                in_process(1, || begin().and_then(|new| commit(new, "new")).unwrap_or_default());
                context.world.stop_faults();
                context.world.fail_calls(from..from + 1);
                in_process(2, || drop(retire()));
                call_count.store(context.world.calls(), Ordering::Relaxed);
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

#[test]
fn a_checkpoint_that_may_be_committed_is_never_removed_by_the_next_save() {
    let before = |_: &Context| {
        let history = History::new(FOLDER.into(), Some(1), true);
        save(&history, 1, "old").unwrap();
        (history, false)
    };
    let work = |_: &Context, (history, is_saved): &mut (History, bool)| *is_saved = save(history, 2, "new").is_ok();
    let after = |_: &Context, (history, is_saved): (History, bool)| {
        let shown = committed_texts();
        assert!(shown == ["new"] || (shown == ["old"] && !is_saved), "{shown:?}");
        // The next save of the same step starts, and is given up.
        let name = in_process(1, || history.reserve(2, ".pt", &[])).unwrap();
        in_process(1, || drop(Replacement::new(&Target::Path(history.folder().join(&name))).unwrap()));
        history.release_name(&name);
        assert_eq!(committed_texts(), shown, "after a save that was given up");
        in_process(1, || save(&history, 2, "next")).unwrap();
        assert_eq!(committed_texts(), ["next"]);
        in_process(1, || drop(history));
        in_process(2, || save(&History::new(FOLDER.into(), Some(1), true), 3, "last")).unwrap();
        assert_eq!(committed_texts(), ["last"]);
        let left = names();
        let is_known = |name: &String| [MANIFEST, LOCK, "step-00000003.pt"].contains(&name.as_str());
        assert!(left.iter().all(is_known), "{left:?}");
    };
    with_each_failing_call(before, work, after, 20);
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
    with_each_failing_call(before, work, after, 8);
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
    with_each_failing_call(|_: &Context| saved(save_part), work, removed, 20);
    with_each_failing_call(|_: &Context| saved(save_shard), work, removed, 20);
}

/// Pieces that will never be written release their memory to waiting threads.
#[test]
fn a_save_whose_writes_fail_ends() {
    let failed = Arc::new(AtomicU64::new(0));
    for seed in 0..400 {
        let failure_count = Arc::clone(&failed);
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
            failure_count.fetch_add(u64::from(outcome.is_err()), Ordering::Relaxed);
        });
        assert!(report.failures.is_empty(), "seed {seed}: {:#?}", report.failures);
    }
    assert!(failed.load(Ordering::Relaxed) > 100, "only {failed:?} saves met a failure");
}
