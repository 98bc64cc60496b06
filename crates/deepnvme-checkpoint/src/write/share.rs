//! One writer's share of a file, written in two steps: first the independent parts, then those that need other shares'
//! checksums.

use std::ops::Range;
use std::sync::Arc;

use deepnvme_format::checksums::checksums_of;
use deepnvme_io::{DirectState, Durability, Engine, TensorFile};

use super::save::{Save, Saved};
use super::writer::Writer;
use crate::error::Result;
use crate::progress::Progress;
use crate::work_queue::{self, THREADS_MAX};

/// A share after its first step. Dropping it waits for writes in flight.
pub struct Share {
    save: Arc<Save>,
    writer: Writer,
    late: Vec<Range<u64>>,
}

impl Save {
    /// Writes the independent parts of this range of the file, one of [`shares`](super::shares), into a file whose
    /// first byte is the byte `base`. [`Share::finish`] writes the rest.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn share(
        self: Arc<Self>,
        engine: Arc<Engine>,
        file: Arc<TensorFile>,
        range: Range<u64>,
        base: u64,
        progress: Arc<Progress>,
    ) -> Result<Share> {
        progress.expect(range.end - range.start);
        self.starts_after.wait()?;
        let pieces = self.image.pieces(&range);
        let early = pieces.early.len();
        let threads = if self.image.is_on_disk() {
            // Threads that wait for a disk need no core each.
            THREADS_MAX.min(early).max(1)
        } else if matches!(file.direct(), DirectState::Direct { .. }) {
            work_queue::thread_count_beside_engine(early)
        } else {
            work_queue::thread_count(early)
        };
        let writer = Writer::new(engine, file, base, threads, self.options.staging.as_ref(), progress)?;
        if let Some((access, index)) = self.image.gpu() {
            writer.make_known(access, index);
        }
        // Hashing the early pieces completes the checksums of the records in late pieces.
        self.image.hash_late(&pieces.late)?;
        let written = writer.write(&self.image, &pieces.early);
        let share = Share { save: self, writer, late: pieces.late };
        written.map(|()| share)
    }
}

impl Share {
    /// The checksums of the data it has read, for the writers of the other shares.
    #[must_use]
    pub fn tally(&self) -> Vec<u8> {
        self.save.image.tally()
    }

    /// Writes the rest, using the checksums of the other writers, and syncs. Returns the description of the whole file.
    ///
    /// # Errors
    /// `Io` for an error of any write, or `Format` if the others' checksums do not fit.
    pub fn finish(self, others: &[Vec<u8>]) -> Result<Saved> {
        let image = &self.save.image;
        others.iter().try_for_each(|tally| image.add(tally))?;
        image.finish_sums()?;
        let written = self.writer.write(image, &self.late);
        // The caller's memory is no longer read.
        self.writer.progress().mark_filled();
        written.and(self.writer.land_all())?;
        self.writer.engine().sync(self.writer.file(), self.save.options.durability.min(Durability::Data))?;
        let (index_offset, index) = image.index();
        let (index_bytes, index_crc64) = (index.len() as u64, checksums_of(index).crc64);
        Ok(Saved { bytes: image.bytes(), index_offset, index_bytes, index_crc64 })
    }
}
