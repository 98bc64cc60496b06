//! Judge the state after all processes ended or the power was cut, and the next processes that use it.

use std::path::PathBuf;
use std::sync::Arc;

use deepnvme_checkpoint::read::find_set;
use deepnvme_file::StripeSet;
use deepnvme_io::mem::simulated as memory;
use deepnvme_mem::sync::ignore_poison;
use deepnvme_simulation_runtime::thread;

use super::saves::{Play, Way, complain, lock, read, save};
use crate::scenario::content::{Content, Shown, index_of};
use crate::scenario::context::{Context, POOL_BYTES};
use crate::scenario::folders::is_unprovable;
use crate::scenario::users;
use crate::world::OUTSIDE;

/// Reads of an index that succeed before one fails.
const READS_MAX: u64 = 8;

/// Judge the state; after a power cut, less may remain.
pub(super) fn aftermath(context: &Context, play: &Arc<Play>, is_cut: bool) {
    check(context, play, is_cut, "afterwards");
    begin_again(context, play);
    check(context, play, is_cut, "after a save that was given up");
    recover(context, play);
    users::check_foreign(context);
}

/// Check every name.
fn check(context: &Context, play: &Arc<Play>, after_cut: bool, when: &str) {
    debug_assert_eq!(thread::process(), OUTSIDE, "nothing may fail here");
    let Ok(engine) = context.engine(97) else { return };
    for item in &play.items {
        let log = lock(&item.log).clone();
        for way in &item.ways {
            let may_be_torn = after_cut && log.has_careless();
            let problem = match read(play, &engine, way) {
                Ok(Shown::Nothing) => log.judge(None, after_cut),
                Ok(Shown::Saved(version)) => log.judge(Some(version), after_cut),
                // Torn plain bytes are undetectable. A checkpoint detects them.
                Ok(Shown::Foreign(_)) if may_be_torn && play.content == Content::Bytes => None,
                Ok(Shown::Foreign(text)) => Some(format!("it shows {text}")),
                Err(_) if may_be_torn => None,
                Err(error) => Some(format!("it cannot be read: {error}")),
            };
            if let Some(problem) = problem {
                context.fail(format!("{when}, {}: {problem}", way.path().display()));
            }
        }
    }
}

/// Starting a save replaces nothing, whatever is cleaned up, even if the existing file is unreadable.
fn begin_again(context: &Context, play: &Arc<Play>) {
    let again = Arc::clone(play);
    // A file that was read once may be unreadable the next time.
    let reads = {
        let mut state = context.world.state();
        state.rng().chance(500).then(|| state.rng().below(READS_MAX))
    };
    let process = context.process(499, move |context| {
        let Ok(engine) = context.engine(95) else { return };
        for (item, it) in again.items.iter().enumerate() {
            if let Some(reads) = reads {
                let path = it.ways[0].path();
                let is_index = again.content == Content::Shards;
                context.world.refuse_reading(&if is_index { index_of(&path) } else { path }, reads);
            }
            let outcome = save(context, &again, &engine, item, &Way { gives_up: true, ..Way::default() });
            if reads.is_none() {
                complain(context, outcome);
            }
        }
    });
    context.join(vec![process]);
    context.world.calm();
}

/// Save each name once more, without faults: it succeeds, and leaves no other file of ours.
fn recover(context: &Context, play: &Arc<Play>) {
    let again = Arc::clone(play);
    let process = context.process(500, move |context| {
        let Ok(engine) = context.engine(96) else { return };
        for item in 0..again.items.len() {
            let before = memory::reset_peak();
            complain(context, save(context, &again, &engine, item, &Way::default()));
            let version = *ignore_poison(again.next_version.lock());
            let (used, bound) = (memory::mapped_bytes_peak() - before, POOL_BYTES + again.memory_bound(version));
            if used > bound {
                context.fail(format!("a save used {used} bytes of memory; its bound is {bound}"));
            }
        }
    });
    context.join(vec![process]);
    check(context, play, false, "after the next save");
    if !context.world.state().setup.has_locks {
        return;
    }
    let mut expected: Vec<PathBuf> = Vec::new();
    for item in &play.items {
        expected.push(item.ways[0].path());
        if let Ok(set) = StripeSet::from_manifest(&item.ways[0].path()) {
            expected.extend(set.parts().iter().cloned());
        }
        if play.content == Content::Shards {
            expected.push(index_of(&item.ways[0].path()));
        }
        if play.content == Content::Shards
            && let Ok(set) = find_set(&item.ways[0].path())
        {
            expected.extend(set.files.into_iter().map(|file| file.path));
        }
    }
    for folder in &play.folders {
        for path in users::ours_in(context, folder) {
            if !expected.contains(&path) && !is_unprovable(context, &path) {
                context.fail(format!("{} is left behind", path.display()));
            }
        }
    }
}
