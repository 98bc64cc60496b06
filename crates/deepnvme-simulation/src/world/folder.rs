//! The names of one folder: as they are, as they are on the disk, and the changes in between. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};

use super::journal::ChangeId;

/// Names a file of the simulated world.
pub type Inode = u64;

/// What each name refers to.
pub type Names = BTreeMap<OsString, Inode>;

/// A folder.
#[derive(Clone, Debug, Default)]
pub struct Folder {
    names: Names,
    durable: Names,
    changes: Vec<Change>,
}

/// One change of one or two names, made at once.
#[derive(Clone, Debug)]
struct Change {
    id: ChangeId,
    becomes: Vec<(OsString, Option<Inode>)>,
}

impl Folder {
    /// The names now.
    #[must_use]
    pub fn names(&self) -> &Names {
        &self.names
    }

    /// What the name refers to now.
    #[must_use]
    pub fn get(&self, name: &OsStr) -> Option<Inode> {
        self.names.get(name).copied()
    }

    /// Changes what names refer to, at once; a power cut undoes all of it or nothing.
    pub fn change(&mut self, id: ChangeId, becomes: Vec<(OsString, Option<Inode>)>) {
        apply(&mut self.names, &becomes);
        self.changes.push(Change { id, becomes });
    }

    /// Makes the changes up to that one durable.
    pub fn sync(&mut self, last: ChangeId) {
        let (safe, at_risk): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.changes).into_iter().partition(|change| change.id <= last);
        self.changes = at_risk;
        for change in &safe {
            apply(&mut self.durable, &change.becomes);
        }
    }

    /// Changes that a power cut now could lose.
    #[must_use]
    pub fn unsynced(&self) -> usize {
        self.changes.len()
    }

    /// The names that a power cut could leave: `keeps` is asked of each change that is not durable. A change that builds on
    /// a lost one of the same name is lost, too.
    pub fn crash(&mut self, mut keeps: impl FnMut(ChangeId) -> bool) {
        let mut lost: BTreeSet<OsString> = BTreeSet::new();
        for change in std::mem::take(&mut self.changes) {
            let builds_on_lost = change.becomes.iter().any(|(name, _)| lost.contains(name));
            if builds_on_lost || !keeps(change.id) {
                lost.extend(change.becomes.into_iter().map(|(name, _)| name));
            } else {
                apply(&mut self.durable, &change.becomes);
            }
        }
        self.names = self.durable.clone();
    }

    /// Forgets names of files that are no more.
    pub fn retain(&mut self, exists: impl Fn(Inode) -> bool) {
        self.names.retain(|_, inode| exists(*inode));
        self.durable = self.names.clone();
    }
}

fn apply(names: &mut Names, becomes: &[(OsString, Option<Inode>)]) {
    for (name, inode) in becomes {
        match inode {
            Some(inode) => names.insert(name.clone(), *inode),
            None => names.remove(name),
        };
    }
}
