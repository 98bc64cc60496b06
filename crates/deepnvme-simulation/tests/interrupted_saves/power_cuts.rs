//! Processes die, then the power is cut.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use deepnvme_checkpoint::history::{History, Holder};
use deepnvme_file::replace::PrivateFolder;
use deepnvme_io::Result;
use deepnvme_simulation::run::script;
use deepnvme_simulation::scenario::Context;
use deepnvme_simulation::world::Setup;
use deepnvme_simulation::world::tree::Losses;
use deepnvme_simulation_runtime::thread::in_process;

use crate::setup::{
    FOLDER, LATE_CALLS, LOSSES, begin, commit, committed_texts, cut_power, names, save, set_text, setup, write,
};

/// The second process dies at one of this number of its first calls.
const SECOND_CALLS: u64 = 20;

/// Kills a first process late in its work or at its end, a second at some call after that, then cuts the power.
fn with_both_killed(before: fn(), first: fn(), second: fn(), after: fn(&Context)) {
    let calls = Arc::new(AtomicU64::new(0));
    for first_call in LATE_CALLS {
        for second_call in 0..SECOND_CALLS {
            let (setup, call_count) =
                (Setup { losses: Losses { kept_per_mille: 500, ..LOSSES }, ..setup(true) }, Arc::clone(&calls));
            let report = script(first_call * 1000 + second_call, &setup, move |context| {
                in_process(1, before);
                context.world.fail_calls(first_call..u64::MAX);
                in_process(1, first);
                call_count.store(context.world.calls(), Ordering::Relaxed);
                context.world.fail_calls(second_call..u64::MAX);
                in_process(2, second);
                context.world.stop_faults();
                cut_power(context);
                after(context);
            });
            assert!(report.failures.is_empty(), "{first_call}, then {second_call}: {:#?}", report.failures);
        }
    }
    assert!(calls.load(Ordering::Relaxed) < LATE_CALLS.end, "the first process always died");
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

#[test]
fn a_checkpoint_that_a_power_cut_brings_back_has_its_file() {
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
        let shown = committed_texts();
        assert!(shown == ["old"] || shown == ["new"], "{shown:?}");
    };
    let first = || drop(saved(2, "new"));
    with_both_killed(|| saved(1, "old").unwrap(), first, second, after);
}

/// Files in a new folder, after a power cut at any point.
#[test]
fn after_a_power_cut_a_new_folder_is_whole_or_absent() {
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
            let call_count = Arc::clone(&calls);
            let report = script(call * 1000 + seed, &setup, move |context| {
                context.world.fail_calls(call..u64::MAX);
                let _ = in_process(1, || make(false));
                call_count.store(context.world.calls(), Ordering::Relaxed);
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
    assert!(calls.load(Ordering::Relaxed) < CUTS, "the last cut came before the end");
}
