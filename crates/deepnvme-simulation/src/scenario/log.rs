//! Which versions a name may show, after all that was asked for and answered. Pure.

use deepnvme_io::Durability;

use super::payload::Version;

/// What happened to one name, in order.
#[derive(Clone, Debug, Default)]
pub(super) struct Log {
    now: u64,
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

impl Log {
    /// A save begins.
    pub(super) fn begin(&mut self, version: Version, durability: Durability) {
        self.now += 1;
        self.saves.push(Save { version, durability, began: self.now, ended: None, succeeded: false });
    }

    /// It has ended.
    pub(super) fn end(&mut self, version: Version, succeeded: bool) {
        self.now += 1;
        if let Some(save) = self.saves.iter_mut().find(|save| save.version == version) {
            (save.ended, save.succeeded) = (Some(self.now), succeeded);
        }
    }

    /// What is wrong when the name shows that version, or nothing at all; `after_cut` only durable saves count as made.
    #[must_use]
    pub(super) fn judge(&self, shown: Option<Version>, after_cut: bool) -> Option<String> {
        let counts = |save: &&Save| save.succeeded && (!after_cut || save.durability == Durability::Full);
        let Some(shown) = shown else {
            let made = self.saves.iter().find(counts)?;
            return Some(format!(
                "nothing is there, though version {} was saved ({:?})",
                made.version, made.durability
            ));
        };
        let Some(save) = self.saves.iter().find(|save| save.version == shown) else {
            return Some(format!("version {shown} is there, which nobody saved"));
        };
        let ended = save.ended?;
        let newer = self.saves.iter().filter(counts).find(|newer| newer.began > ended)?;
        Some(format!("version {shown} is there, though {} was saved after it ({:?})", newer.version, newer.durability))
    }

    /// Whether some save asked for no durability: then a power cut may leave anything of it.
    #[must_use]
    pub(super) fn has_careless(&self) -> bool {
        self.saves.iter().any(|save| save.durability == Durability::None)
    }
}
