//! The record of a scenario of a checkpoint folder: its saves, and the checkpoints that a user moves.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard};

use deepnvme_io::Durability;
use deepnvme_mem::sync::ignore_poison;

use crate::scenario::content::Content;
use crate::scenario::payload::Version;

/// A folder, and the saves into it.
pub(in crate::scenario) struct Scenario {
    pub(in crate::scenario) content: Content,
    pub(in crate::scenario) folder: PathBuf,
    pub(in crate::scenario) seed: u64,
    pub(in crate::scenario) keep: Option<usize>,
    pub(super) log: Mutex<Log>,
}

#[derive(Clone, Default)]
pub(super) struct Log {
    pub(super) next_version: Version,
    /// Saves by version, with their outcomes.
    pub(super) saves: BTreeMap<Version, Save>,
    clock: u64,
    /// Versions whose files a user has moved away, for a while or for good. Other files may have their names.
    pub(super) moved: BTreeMap<Version, PathBuf>,
    /// Files that came back edited, or when no manifest listed them any more: nobody may remove them.
    pub(super) returned: Vec<PathBuf>,
}

#[derive(Clone)]
pub(super) struct Save {
    pub(super) step: u64,
    pub(super) began: u64,
    pub(super) ended: Option<u64>,
    pub(super) is_committed: bool,
    pub(super) durability: Durability,
}

impl Scenario {
    /// Copies the state so far.
    pub(super) fn copy(&self) -> Self {
        let Self { content, folder, seed, keep, log } = self;
        let log = Mutex::new(lock(log).clone());
        Self { content: *content, folder: folder.clone(), seed: *seed, keep: *keep, log }
    }

    /// Records the start of a save. With several ranks, the first one counts.
    pub(in crate::scenario) fn begin_save(&self, version: Version, step: u64, durability: Durability) {
        let mut log = lock(&self.log);
        log.clock += 1;
        log.next_version = log.next_version.max(version);
        let began = log.clock;
        log.saves.entry(version).or_insert(Save { step, began, ended: None, is_committed: false, durability });
    }

    /// Records the end of a save. With several ranks, it counts if any rank saw it commit.
    pub(in crate::scenario) fn end_save(&self, version: Version, is_committed: bool) {
        let mut log = lock(&self.log);
        log.clock += 1;
        let clock = log.clock;
        if let Some(save) = log.saves.get_mut(&version) {
            (save.ended, save.is_committed) = (Some(clock), save.is_committed || is_committed);
        }
    }
}

pub(super) fn lock(log: &Mutex<Log>) -> MutexGuard<'_, Log> {
    ignore_poison(log.lock())
}
