//! Users of the machine with their own files under any name, including names that they saw us use.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use deepnvme_checkpoint::history::is_checkpoint;
use deepnvme_file::replace::TEMPORARY_MARKER;
use deepnvme_io::fs;
use deepnvme_simulation_runtime::thread::{self, JoinHandle};

use super::context::Context;
use crate::world::FIRST_USER;
use crate::world::tree::Node;

/// Content of every user's file.
const CONTENT: &[u8] = b"precious";

/// Creates a user's file if the name is free, and syncs it with the folder.
pub(super) fn create_user_file(context: &Context, path: &Path) {
    create_file(context, path, true);
}

fn create_file(context: &Context, path: &Path, is_durable: bool) {
    let mut state = context.world.state();
    if state.tree.find(path, false).map_or(true, |place| place.inode.is_some()) {
        return;
    }
    state.before_change();
    let tree = &mut state.tree;
    let Ok(place) = tree.find(path, false) else { return };
    let disk = tree.disk_of(place.folder);
    let Ok(inode) = tree.make(Node::File(crate::world::journal::Journal::of(CONTENT.to_vec())), disk, 0o640, true)
    else {
        return;
    };
    let written = tree.memory(inode).map(|memory| rustix::io::pwrite(memory, CONTENT, 0));
    debug_assert!(written.is_ok(), "memory takes bytes");
    tree.set_names(place.folder, vec![(place.name, Some(inode))]);
    if is_durable {
        let all = tree.last_change();
        let synced = tree.sync(place.folder, &[], all);
        debug_assert!(synced.is_ok(), "a folder was found");
    }
}

/// The names that a user takes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TakenNames {
    /// Private names of files that come and go.
    Private,
    /// Those, and the names that checkpoints are about to get. A `Checkpointer` chooses its names, so it never replaces
    /// a user's file.
    Final,
}

/// Starts a user that watches these folders, and creates files under the names that come and go there.
pub(super) fn start_name_taker(context: &Context, folders: Vec<PathBuf>, taken: TakenNames) -> JoinHandle<()> {
    context.process(FIRST_USER, move |context| {
        let mut rng = context.rng(0x6d69);
        let mut seen: Vec<PathBuf> = Vec::new();
        for _ in 0..rng.within(2..12) {
            for _ in 0..rng.below(20) {
                thread::yield_now();
            }
            for folder in &folders {
                let names = fs::entries(folder).unwrap_or_default();
                seen.extend(names.into_iter().filter(is_private).map(|name| folder.join(name)));
            }
            if seen.is_empty() {
                continue;
            }
            let path = seen[rng.below(seen.len() as u64) as usize].clone();
            // Users that sync would hide missing syncs of others.
            let is_durable = rng.chance(300);
            if let Some(name) = final_name(&path).filter(|_| taken == TakenNames::Final && rng.chance(700)) {
                create_file(context, &path.with_file_name(name), is_durable);
            } else if rng.chance(500) {
                // A copy: the same name except for its last byte.
                let mut bytes = path.file_name().unwrap_or_default().as_bytes().to_vec();
                if let Some(last) = bytes.last_mut() {
                    *last = if *last == b'7' { b'8' } else { b'7' };
                }
                create_file(context, &path.with_file_name(std::ffi::OsStr::from_bytes(&bytes)), is_durable);
            } else {
                create_file(context, &path, is_durable);
            }
        }
    })
}

/// Returns the name that a checkpoint's private file will get.
fn final_name(private: &Path) -> Option<String> {
    let stated = private.file_name()?.to_str()?.strip_prefix('.')?;
    let (name, _) = stated.split_once(TEMPORARY_MARKER)?;
    is_checkpoint(name).then(|| name.to_owned())
}

/// Returns whether a name looks like one of our private ones.
pub(super) fn is_private(name: &OsString) -> bool {
    let bytes = name.as_bytes();
    [&b"deepnvme"[..], b".part-", b".tmp"].iter().any(|mark| bytes.windows(mark.len()).any(|part| part == *mark))
}

/// Lists all files in the folder that do not belong to users.
#[must_use]
pub(super) fn own_files_in(context: &Context, folder: &Path) -> Vec<PathBuf> {
    let state = context.world.state();
    let walked = state.tree.walk();
    let ours = walked.into_iter().filter(|(path, inode)| {
        path.parent() == Some(folder) && state.tree.entry(*inode).is_ok_and(|entry| !entry.is_foreign)
    });
    ours.map(|(path, _)| path).collect()
}

/// Checks all users' files, and reports those that have changed.
pub(super) fn check_user_files(context: &Context) {
    let state = context.world.state();
    let mut wrong = Vec::new();
    for (path, inode) in state.tree.walk() {
        let Ok(entry) = state.tree.entry(inode) else { continue };
        if entry.is_foreign
            && matches!(entry.node, Node::File(_))
            && (entry.mode != 0o640 || state.tree.content(inode).is_ok_and(|content| content != CONTENT))
        {
            wrong.push(path);
        }
    }
    drop(state);
    for path in wrong {
        context.fail(format!("{} of a user has changed", path.display()));
    }
}
