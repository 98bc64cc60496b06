//! The names of one folder: current, durable, and the changes in between. This module does no I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};

use super::journal::ChangeId;

/// Number of a file in the simulated world.
pub type Inode = u64;

/// The file of each name.
pub type Names = BTreeMap<OsString, Inode>;

/// A folder.
#[derive(Clone, Debug, Default)]
pub struct Folder {
    names: Names,
    durable: Names,
    changes: Vec<Change>,
}

/// An atomic change of one or two names.
#[derive(Clone, Debug)]
struct Change {
    id: ChangeId,
    updates: Vec<(OsString, Option<Inode>)>,
}

impl Folder {
    /// Returns the current names.
    #[must_use]
    pub fn names(&self) -> &Names {
        &self.names
    }

    /// Returns the current file of a name.
    #[must_use]
    pub fn get(&self, name: &OsStr) -> Option<Inode> {
        self.names.get(name).copied()
    }

    /// Changes names atomically. A power cut reverts all of the change or nothing.
    pub fn change(&mut self, id: ChangeId, updates: Vec<(OsString, Option<Inode>)>) {
        apply(&mut self.names, &updates);
        self.changes.push(Change { id, updates });
    }

    /// Makes durable the changes up to that one.
    pub fn sync(&mut self, last: ChangeId) {
        let (safe, at_risk): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.changes).into_iter().partition(|change| change.id <= last);
        self.changes = at_risk;
        for change in &safe {
            apply(&mut self.durable, &change.updates);
        }
    }

    /// Returns the number of changes that a power cut now could lose.
    #[must_use]
    pub fn unsynced(&self) -> usize {
        self.changes.len()
    }

    /// Applies a power cut. `keeps` decides about each change that is not durable. A change that follows a lost one of
    /// the same name is also lost.
    pub fn crash(&mut self, mut keeps: impl FnMut(ChangeId) -> bool) {
        let mut lost: BTreeSet<OsString> = BTreeSet::new();
        for change in std::mem::take(&mut self.changes) {
            let builds_on_lost = change.updates.iter().any(|(name, _)| lost.contains(name));
            if builds_on_lost || !keeps(change.id) {
                lost.extend(change.updates.into_iter().map(|(name, _)| name));
            } else {
                apply(&mut self.durable, &change.updates);
            }
        }
        self.names = self.durable.clone();
    }

    /// Removes the names of deleted files.
    pub fn retain(&mut self, exists: impl Fn(Inode) -> bool) {
        self.names.retain(|_, inode| exists(*inode));
        self.durable = self.names.clone();
    }
}

fn apply(names: &mut Names, updates: &[(OsString, Option<Inode>)]) {
    for (name, inode) in updates {
        match inode {
            Some(inode) => names.insert(name.clone(), *inode),
            None => names.remove(name),
        };
    }
}
