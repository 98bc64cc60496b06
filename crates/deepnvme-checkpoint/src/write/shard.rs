//! One writer's shard of a file, written in two steps: first the independent parts, then those that need other shards'
//! checksums.

use std::ops::Range;
use std::sync::Arc;

use deepnvme_format::checksums::checksums_of;
use deepnvme_io::{DirectState, Durability, Engine, TensorFile};

use super::save::{Save, Saved};
use super::write_pipeline::{Destination, WritePipeline};
use crate::error::Result;
use crate::progress::Progress;
use crate::work_queue::{self, THREADS_MAX};

/// A shard after its first step. Dropping it waits for writes in flight.
pub struct Shard {
    save: Arc<Save>,
    pipeline: WritePipeline,
    late: Vec<Range<u64>>,
}

impl Save {
    /// Writes the independent parts of this range of the file, one of [`shard_ranges`](super::shard_ranges), into a
    /// file whose first byte is the byte `base`. [`Shard::finish`] writes the rest.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn start_shard(
        self: Arc<Self>,
        engine: Arc<Engine>,
        file: Arc<TensorFile>,
        range: Range<u64>,
        base: u64,
        progress: Arc<Progress>,
    ) -> Result<Shard> {
        progress.expect(range.end - range.start);
        self.starts_after.wait()?;
        let pieces = self.layout.pieces(&range);
        let early = pieces.early.len();
        let threads = if self.layout.is_on_disk() {
            // Threads that wait for a disk need no core each.
            THREADS_MAX.min(early).max(1)
        } else if matches!(file.direct(), DirectState::Direct { .. }) {
            work_queue::thread_count_with_engine(early)
        } else {
            work_queue::thread_count(early)
        };
        let destination = Destination { engine, file, base };
        let pipeline = WritePipeline::new(destination, threads, self.options.staging.as_ref(), progress)?;
        if let Some((access, index)) = self.layout.gpu() {
            pipeline.register_pool(&access, index);
        }
        // Late pieces may contain parts of large records. With those hashed, the early pieces complete the checksums.
        self.layout.hash_late(&pieces.late)?;
        let written = pipeline.write(&self.layout, &pieces.early);
        let shard = Shard { save: self, pipeline, late: pieces.late };
        written.map(|()| shard)
    }
}

impl Shard {
    /// Returns the checksums of the data it has read, for the writers of the other shards.
    #[must_use]
    pub fn checksums(&self) -> Vec<u8> {
        self.save.layout.encode_checksums()
    }

    /// Writes the rest, using the checksums of the other writers, and syncs the data unless the durability is `None`.
    /// Returns the description of the whole file.
    ///
    /// # Errors
    /// `Io` for an error of any write, `Format` if the others' checksums do not fit, or `Interrupted`.
    pub fn finish(self, others: &[Vec<u8>]) -> Result<Saved> {
        let layout = &self.save.layout;
        others.iter().try_for_each(|encoded| layout.add_checksums(encoded))?;
        layout.finish_checksums()?;
        let written = self.pipeline.write(layout, &self.late);
        // The caller's memory is no longer read.
        layout.release_sources();
        self.pipeline.progress().mark_filled();
        written.and(self.pipeline.wait_all())?;
        self.pipeline.engine().sync(self.pipeline.file(), self.save.options.durability.min(Durability::Data))?;
        let (index_offset, index) = layout.index();
        let (index_bytes, index_crc64) = (index.len() as u64, checksums_of(index).crc64);
        Ok(Saved { bytes: layout.bytes(), index_offset, index_bytes, index_crc64 })
    }
}
