//! The history of one real file, by its writes: durable contents, and writes that a power cut could lose.
//! `world::journal` of `deepnvme-simulation` also tracks sizes and truncations of files that exist in memory only.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use deepnvme_io::op::Op;

use crate::data::first_bytes_of;
use crate::rng::Rng;
use crate::sectors::write_sectors;

/// Identifies a write in the journal.
pub(super) type WriteId = u64;

/// The durable contents, and the writes since, in order of effect.
#[derive(Debug, Default)]
pub(super) struct Journal {
    durable: Vec<u8>,
    writes: Vec<Written>,
    next_id: WriteId,
}

#[derive(Debug)]
struct Written {
    id: WriteId,
    offset: usize,
    bytes: Vec<u8>,
    /// Whether its completion was returned. Before that, no sync makes the write durable.
    reported: bool,
}

impl Journal {
    /// Creates a journal with the current contents; `None` for files without contents.
    pub(super) fn of_file(file: &OwnedFd) -> Option<Self> {
        let kind = rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(file).ok()?.st_mode);
        if !kind.is_file() {
            return None;
        }
        // Reopened, since the op's descriptor may be write-only or direct.
        let durable = std::fs::read(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
        Some(Self { durable, ..Self::default() })
    }

    /// Records that the first `written` bytes of the op are in the file.
    pub(super) fn record(&mut self, op: &Op, written: usize) -> WriteId {
        let bytes = first_bytes_of(op, written);
        self.next_id += 1;
        self.writes.push(Written { id: self.next_id, offset: op.offset as usize, bytes, reported: false });
        self.next_id
    }

    /// Marks a write as completed.
    pub(super) fn report(&mut self, id: WriteId) {
        if let Some(write) = self.writes.iter_mut().find(|write| write.id == id) {
            write.reported = true;
        }
    }

    /// Returns the writes that a sync submitted now must make durable: the completed ones.
    pub(super) fn completed_writes(&self) -> Vec<WriteId> {
        self.writes.iter().filter(|write| write.reported).map(|write| write.id).collect()
    }

    /// Makes the writes that were completed before the sync durable, and the length of the file if it is shorter or no
    /// other write is left.
    pub(super) fn sync(&mut self, completed_before_sync: &[WriteId], file: impl AsFd) {
        let (safe, at_risk) =
            std::mem::take(&mut self.writes).into_iter().partition(|w| completed_before_sync.contains(&w.id));
        self.writes = at_risk;
        let safe: Vec<Written> = safe;
        for write in &safe {
            write.apply(&mut self.durable, |_| true);
        }
        if let Ok(stat) = rustix::fs::fstat(file) {
            let len = stat.st_size as usize;
            if len < self.durable.len() || self.writes.is_empty() {
                self.durable.resize(len, 0);
            }
        }
    }

    pub(super) const fn unsynced(&self) -> usize {
        self.writes.len()
    }

    /// Returns one of the possible contents after a power cut.
    pub(super) fn crash_image(&self, rng: &mut Rng) -> Vec<u8> {
        let mut image = self.durable.clone();
        for write in &self.writes {
            match rng.below(3) {
                0 => {}
                1 => write.apply(&mut image, |_| true),
                _ => write.apply(&mut image, |_| rng.chance(500)),
            }
        }
        image
    }
}

impl Written {
    /// Writes the kept sectors into the image, which grows if they are past its end.
    fn apply(&self, image: &mut Vec<u8>, keep: impl FnMut(usize) -> bool) {
        write_sectors(image, self.offset, &self.bytes, keep);
    }
}
