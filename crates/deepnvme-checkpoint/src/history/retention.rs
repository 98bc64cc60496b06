//! Transitions of the manifest: retention and retirement. Pure.

use std::collections::HashSet;
use std::ffi::OsString;

use super::manifest::{Manifest, ManifestEntry};

/// Returns the manifest after a new checkpoint. It replaces others of the same step. Of the rest, the newest `keep - 1`
/// stay, and all checkpoints whose saves began later (`newer` has their steps). "Newest" means saved last, not the
/// highest step: a run may return to an earlier step. The others move to the retired list. A checkpoint without files
/// (`is_there`) is dropped instead: once retired, its file would be removed if somebody restored it.
#[must_use]
pub(super) fn next(
    now: &Manifest,
    new: &ManifestEntry,
    keep: Option<usize>,
    newer: &[u64],
    is_there: impl Fn(&ManifestEntry) -> bool,
) -> Manifest {
    let there = now.checkpoints.iter().filter(|entry| is_there(entry)).cloned();
    let (mut staying, mut retired): (Vec<ManifestEntry>, Vec<ManifestEntry>) =
        there.partition(|entry| entry.step != new.step);
    let place = staying.iter().position(|entry| newer.contains(&entry.step)).unwrap_or(staying.len());
    staying.insert(place, new.clone());
    if let Some(keep) = keep {
        let surplus = staying.len().saturating_sub(keep.max(1));
        retired.extend(staying.drain(..surplus.min(place)));
    }
    let mut all_retired = now.retired.clone();
    all_retired.extend(retired);
    // A current name must never be removed.
    all_retired.retain(|entry| entry.file != new.file);
    Manifest { checkpoints: staying, retired: all_retired, ..Manifest::empty() }
}

/// Returns the manifest without the private names of files that have their final names.
#[must_use]
pub(super) fn placed(now: &Manifest, files: &[String]) -> Manifest {
    let (mut next, files) = (now.clone(), files.iter().collect::<HashSet<&String>>());
    for entry in &mut next.checkpoints {
        if files.contains(&entry.file) {
            entry.pending.clear();
        }
    }
    next
}

/// Returns the manifest without the retired checkpoints `files`, which have no files of ours left.
#[must_use]
pub(super) fn forgotten(now: &Manifest, files: &[String]) -> Manifest {
    let (mut next, files) = (now.clone(), files.iter().collect::<HashSet<&String>>());
    next.retired.retain(|entry| !files.contains(&entry.file));
    next
}

/// Returns the manifest with another name for a checkpoint of one file that still has a private name.
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

/// Returns the names that look like checkpoints but are not listed.
#[must_use]
pub(super) fn unlisted(now: &Manifest, names: &[OsString]) -> Vec<String> {
    let (known, names) = (now.names(), names.iter().filter_map(|name| name.to_str()));
    let mut found: Vec<String> =
        names.filter(|name| super::names::is_checkpoint(name) && !known.contains(name)).map(str::to_owned).collect();
    found.sort_unstable();
    found
}
