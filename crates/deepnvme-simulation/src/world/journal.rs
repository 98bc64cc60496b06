//! The history of one simulated file, which exists in memory only: durable content, and changes that a power cut could
//! revert. This module does no I/O. `scheduled_backend::journal` of `deepnvme-testkit` records writes to real files
//! instead.

use std::sync::Arc;

use deepnvme_testkit::rng::Rng;
use deepnvme_testkit::sectors::write_sectors;

/// Number of a change; later ones have larger numbers.
pub type ChangeId = u64;

/// The durable content, and the later changes in the order of their effect.
///
/// Copies share the bytes.
#[derive(Clone, Debug, Default)]
pub struct Journal {
    durable: Arc<Vec<u8>>,
    changes: Vec<Change>,
}

#[derive(Clone, Debug)]
struct Change {
    id: ChangeId,
    kind: ChangeKind,
    /// Whether the writer knows that the change is done. Before that, no sync can promise it.
    is_reported: bool,
}

#[derive(Clone, Debug)]
enum ChangeKind {
    Write { offset: usize, bytes: Arc<[u8]> },
    Resize { bytes: usize },
}

impl Journal {
    /// Creates the journal of a file with this durable content.
    #[must_use]
    pub fn of(durable: Vec<u8>) -> Self {
        Self { durable: Arc::new(durable), changes: Vec::new() }
    }

    /// Records a write.
    pub fn wrote(&mut self, id: ChangeId, offset: usize, bytes: Vec<u8>, is_reported: bool) {
        self.changes.push(Change { id, kind: ChangeKind::Write { offset, bytes: bytes.into() }, is_reported });
    }

    /// Records a resize.
    pub fn resized(&mut self, id: ChangeId, bytes: usize) {
        self.changes.push(Change { id, kind: ChangeKind::Resize { bytes }, is_reported: true });
    }

    /// Records that the writer knows that the change is done.
    pub fn report(&mut self, id: ChangeId) {
        if let Some(change) = self.changes.iter_mut().find(|change| change.id == id) {
            change.is_reported = true;
        }
    }

    /// Returns the changes that a sync starting now promises: those whose writers know that they are done.
    #[must_use]
    pub fn promised(&self) -> Vec<ChangeId> {
        self.changes.iter().filter(|change| change.is_reported).map(|change| change.id).collect()
    }

    /// Makes these changes durable.
    pub fn sync(&mut self, promised: &[ChangeId]) {
        let (safe, at_risk): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.changes).into_iter().partition(|change| promised.contains(&change.id));
        self.changes = at_risk;
        for change in &safe {
            change.kind.apply(Arc::make_mut(&mut self.durable), |_| true);
        }
    }

    /// Returns the number of changes that a power cut now could lose.
    #[must_use]
    pub fn unsynced(&self) -> usize {
        self.changes.len()
    }

    /// Draws a content that a power cut could leave. Each change that is not durable is kept, lost or torn. `keep` of a
    /// thousand are kept whole.
    #[must_use]
    pub fn crash_image(&self, rng: &mut Rng, keep: u32) -> Vec<u8> {
        let mut image = self.durable.to_vec();
        for change in &self.changes {
            if rng.chance(keep) {
                change.kind.apply(&mut image, |_| true);
            } else if rng.chance(500) {
                change.kind.apply(&mut image, |_| rng.chance(500));
            }
        }
        image
    }
}

impl ChangeKind {
    /// Copies the kept sectors into the image, which grows as needed.
    fn apply(&self, image: &mut Vec<u8>, mut keep: impl FnMut(usize) -> bool) {
        match self {
            Self::Write { offset, bytes } => write_sectors(image, *offset, bytes, keep),
            Self::Resize { bytes } => {
                if keep(0) {
                    image.resize(*bytes, 0);
                }
            }
        }
    }
}
