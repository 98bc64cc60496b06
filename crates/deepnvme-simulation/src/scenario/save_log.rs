//! The versions that may be under a name, given the starts and ends of its saves. This module does no I/O.

use deepnvme_io::Durability;

use super::payload::Version;

/// Events of one name, in order.
#[derive(Clone, Debug, Default)]
pub(super) struct SaveLog {
    clock: u64,
    saves: Vec<Save>,
}

#[derive(Clone, Debug)]
struct Save {
    version: Version,
    durability: Durability,
    began: u64,
    ended: Option<u64>,
    succeeded: bool,
}

impl SaveLog {
    /// Records the start of a save.
    pub(super) fn begin(&mut self, version: Version, durability: Durability) {
        self.clock += 1;
        self.saves.push(Save { version, durability, began: self.clock, ended: None, succeeded: false });
    }

    /// Records the end of a save.
    pub(super) fn end(&mut self, version: Version, succeeded: bool) {
        self.clock += 1;
        if let Some(save) = self.saves.iter_mut().find(|save| save.version == version) {
            (save.ended, save.succeeded) = (Some(self.clock), succeeded);
        }
    }

    /// Checks a version, or a missing file, under the name. Returns the error, if any. With `after_cut`, only durable
    /// saves count.
    #[must_use]
    pub(super) fn check(&self, found: Option<Version>, after_cut: bool) -> Option<String> {
        let counts = |save: &&Save| save.succeeded && (!after_cut || save.durability == Durability::Full);
        let Some(found) = found else {
            let saved = self.saves.iter().find(counts)?;
            return Some(format!(
                "nothing is there, though version {} was saved ({:?})",
                saved.version, saved.durability
            ));
        };
        let Some(save) = self.saves.iter().find(|save| save.version == found) else {
            return Some(format!("version {found} is there, which nobody saved"));
        };
        let ended = save.ended?;
        let newer = self.saves.iter().filter(counts).find(|newer| newer.began > ended)?;
        Some(format!("version {found} is there, though {} was saved after it ({:?})", newer.version, newer.durability))
    }

    /// Returns whether any save was not durable: after a power cut it may leave any content.
    #[must_use]
    pub(super) fn has_non_durable(&self) -> bool {
        self.saves.iter().any(|save| save.durability == Durability::None)
    }
}
