//! Check the state after all processes ended or the power was cut, and the next processes that use it.

use std::path::PathBuf;
use std::sync::Arc;

use deepnvme_checkpoint::read::find_set;
use deepnvme_file::StripeSet;
use deepnvme_io::mem::mapped_bytes as memory;
use deepnvme_mem::sync::ignore_poison;
use deepnvme_simulation_runtime::thread;

use super::saves::{SaveChoice, Scenario, lock, read, report_failure, save};
use crate::scenario::content::{Content, FoundContent, index_of};
use crate::scenario::context::{
    Context, FILE_CHECK_ENGINE, LAST_SAVE_ENGINE, LAST_SAVE_PROCESS, POOL_BYTES, UNFINISHED_SAVE_ENGINE,
    UNFINISHED_SAVE_PROCESS,
};
use crate::scenario::unproven::may_be_foreign;
use crate::scenario::users;
use crate::world::SIMULATOR;

/// Fewer reads of a file than this succeed before one fails.
const READS_MAX: u64 = 8;

/// Checks the state; after a power cut, less may remain.
pub(super) fn check_end(context: &Context, scenario: &Arc<Scenario>, is_cut: bool) {
    check(context, scenario, is_cut, "afterwards");
    start_unfinished_saves(context, scenario);
    check(context, scenario, is_cut, "after a save that was given up");
    save_again(context, scenario);
    users::check_user_files(context);
}

/// Checks every name.
fn check(context: &Context, scenario: &Arc<Scenario>, after_cut: bool, when: &str) {
    debug_assert_eq!(thread::process(), SIMULATOR, "nothing may fail here");
    let Ok(engine) = context.engine(FILE_CHECK_ENGINE) else { return };
    for item in &scenario.items {
        let log = lock(&item.log).clone();
        for name in &item.names {
            let may_be_torn = after_cut && log.has_non_durable();
            let problem = match read(scenario, &engine, name) {
                Ok(FoundContent::Missing) => log.check(None, after_cut),
                Ok(FoundContent::Saved(version)) => log.check(Some(version), after_cut),
                // Torn plain bytes are undetectable. A checkpoint detects them.
                Ok(FoundContent::Foreign(_)) if may_be_torn && scenario.content == Content::Bytes => None,
                Ok(FoundContent::Foreign(text)) => Some(format!("it shows {text}")),
                Err(_) if may_be_torn => None,
                Err(error) => Some(format!("it cannot be read: {error}")),
            };
            if let Some(problem) = problem {
                context.fail(format!("{when}, {}: {problem}", name.path().display()));
            }
        }
    }
}

/// Starting a save replaces nothing, whatever is cleaned up, even if the existing file is unreadable.
fn start_unfinished_saves(context: &Context, scenario: &Arc<Scenario>) {
    let again = Arc::clone(scenario);
    // A file that was read once may be unreadable the next time.
    let reads = {
        let mut state = context.world.state();
        state.rng().chance(500).then(|| state.rng().below(READS_MAX))
    };
    let process = context.process(UNFINISHED_SAVE_PROCESS, move |context| {
        let Ok(engine) = context.engine(UNFINISHED_SAVE_ENGINE) else { return };
        for (item, it) in again.items.iter().enumerate() {
            if let Some(reads) = reads {
                let path = it.names[0].path();
                let is_index = again.content == Content::Shards;
                context.world.make_unreadable(&if is_index { index_of(&path) } else { path }, reads);
            }
            let outcome =
                save(context, &again, &engine, item, &SaveChoice { is_cancelled: true, ..SaveChoice::default() });
            if reads.is_none() {
                report_failure(context, outcome);
            }
        }
    });
    context.join(vec![process]);
    context.world.stop_faults();
}

/// Saves each name once more, without faults: it succeeds, and leaves no other file of ours.
fn save_again(context: &Context, scenario: &Arc<Scenario>) {
    let again = Arc::clone(scenario);
    let process = context.process(LAST_SAVE_PROCESS, move |context| {
        let Ok(engine) = context.engine(LAST_SAVE_ENGINE) else { return };
        for item in 0..again.items.len() {
            let before = memory::reset_peak();
            report_failure(context, save(context, &again, &engine, item, &SaveChoice::default()));
            let version = *ignore_poison(again.next_version.lock());
            let (used, bound) = (memory::mapped_bytes_peak() - before, POOL_BYTES + again.memory_bound(version));
            if used > bound {
                context.fail(format!("a save used {used} bytes of memory; its bound is {bound}"));
            }
        }
    });
    context.join(vec![process]);
    check(context, scenario, false, "after the next save");
    if !context.world.state().setup.has_locks {
        return;
    }
    let mut expected: Vec<PathBuf> = Vec::new();
    for item in &scenario.items {
        expected.push(item.names[0].path());
        if let Ok(set) = StripeSet::from_manifest(&item.names[0].path()) {
            expected.extend(set.parts().iter().cloned());
        }
        if scenario.content == Content::Shards {
            expected.push(index_of(&item.names[0].path()));
        }
        if scenario.content == Content::Shards
            && let Ok(set) = find_set(&item.names[0].path())
        {
            expected.extend(set.files.into_iter().map(|file| file.path));
        }
    }
    for folder in &scenario.folders {
        for path in users::own_files_in(context, folder) {
            if !expected.contains(&path) && !may_be_foreign(context, &path) {
                context.fail(format!("{} is left behind", path.display()));
            }
        }
    }
}
