//! What stays, what is retired, and what a list becomes. Pure: nothing here looks at a disk.

use super::manifest::{Entry, Manifest};

/// The manifest after a new checkpoint: of its step only the new one stays, and of the others the `keep - 1` of the
/// highest steps; the new one stays also where its step is not among them. The same manifest records the removed entries
/// as retired. `is_there` says of a listed one whether any file of it is left. One that is missing is forgotten: were it
/// retired, its file would be removed when somebody brings it back.
#[must_use]
pub(super) fn next(now: &Manifest, new: &Entry, keep: Option<usize>, is_there: impl Fn(&Entry) -> bool) -> Manifest {
    let there = now.checkpoints.iter().filter(|entry| is_there(entry)).cloned();
    let (mut staying, mut retired): (Vec<Entry>, Vec<Entry>) = there.partition(|entry| entry.step != new.step);
    if let Some(keep) = keep {
        let surplus = staying.len().saturating_sub(keep.max(1) - 1);
        retired.extend(staying.drain(..surplus));
    }
    staying.push(new.clone());
    staying.sort_by_key(|entry| entry.step);
    let mut all_retired = now.retired.clone();
    all_retired.extend(retired);
    // A name that counts is never one that is to be removed.
    all_retired.retain(|entry| entry.file != new.file);
    Manifest { checkpoints: staying, retired: all_retired, ..Manifest::empty() }
}

/// The manifest without the private names of files that have their own now.
#[must_use]
pub(super) fn placed(now: &Manifest, files: &[String]) -> Manifest {
    let mut next = now.clone();
    for entry in &mut next.checkpoints {
        if files.contains(&entry.file) {
            entry.pending.clear();
        }
    }
    next
}

/// The manifest without retired checkpoints of which nothing is left that is ours.
#[must_use]
pub(super) fn forgotten(now: &Manifest, files: &[String]) -> Manifest {
    let mut next = now.clone();
    next.retired.retain(|entry| !files.contains(&entry.file));
    next
}

/// The manifest with another name for a checkpoint of one file, which waits for its name still.
#[must_use]
pub(super) fn renamed(now: &Manifest, file: &str, to: &str) -> Manifest {
    let mut next = now.clone();
    for entry in next.checkpoints.iter_mut().filter(|entry| entry.file == file && entry.parts.is_empty()) {
        if let Some(private) = entry.pending.remove(file) {
            to.clone_into(&mut entry.file);
            entry.pending.insert(to.to_owned(), private);
        }
    }
    next
}

/// Those of the names that look like checkpoints and are in no list.
#[must_use]
pub(super) fn unlisted<'a>(now: &Manifest, names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut found: Vec<String> =
        names.filter(|name| super::names::is_checkpoint(name) && !now.knows(name)).map(str::to_owned).collect();
    found.sort_unstable();
    found
}
