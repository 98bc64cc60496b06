//! Verifies packed tables of rows, which have checksums of their own.

use std::sync::Arc;
use std::time::Instant;

use deepnvme_checkpoint::read::{CheckpointFile, FileMetadata, Reader};
use deepnvme_file::VersionedFile;
use deepnvme_io::Engine;
use deepnvme_perf::{Error, Result};
use deepnvme_rows::{Error as RowsError, PACKED_KEY, PackedDescription, PackedTensors, RowStore};

use super::failed;
use super::verify::{Coverage, Verdict, Verification, Verifier, unverified};

/// Memory of the reads in flight, unless a block needs more.
const MEMORY_BYTES: u64 = 64 << 20;
/// Blocks in memory, at least.
const BLOCKS_MIN: u64 = 4;

impl Verifier<'_> {
    /// Verifies a file if it is a packed table. `None` if it is another file.
    pub(super) fn verify_packed_rows(&self, file: &CheckpointFile, began: Instant) -> Result<Option<Verification>> {
        let target = file.target().map_err(failed)?;
        let engine = self.engines.of(&target);
        let reader = self.opened(engine, target).map_err(failed)?;
        let Some(described) = Described::of(&reader) else { return Ok(None) };
        self.progress.expect(described.tensors.rows.1);
        let progress = |bytes| self.progress.advance(bytes);
        let verified = described.verify(engine, &reader, &progress, &|| self.progress.is_stopped());
        let outcome = |verdict, coverage, bytes| Verification {
            seconds: began.elapsed().as_secs_f64(),
            coverage,
            bytes,
            finding: None,
            ..unverified(&file.path, verdict, String::new())
        };
        match verified {
            Ok(()) => Ok(Some(outcome(Verdict::Sound, Coverage::File, described.tensors.rows.1))),
            Err(RowsError::Interrupted) => Err(Error::Interrupted),
            Err(RowsError::Io(error)) if error.kind() != deepnvme_io::ErrorKind::Corrupt => Err(Error::Engine(error)),
            Err(error) => {
                let finding = Some(error.to_string());
                Ok(Some(Verification { finding, ..outcome(Verdict::Damaged, Coverage::Nothing, 0) }))
            }
        }
    }
}

/// A packed table in its file.
struct Described<'a> {
    text: &'a str,
    tensors: PackedTensors,
}

impl<'a> Described<'a> {
    fn of(reader: &'a Reader) -> Option<Self> {
        let FileMetadata::Safetensors { header } = reader.file_metadata() else { return None };
        let text = header.metadata.iter().find(|(key, _)| key == PACKED_KEY).map(|(_, text)| &**text)?;
        let tensors = PackedTensors::find(|name| {
            let extent = reader.extents().iter().find(|extent| extent.name == name)?;
            Some((extent.data_offset, extent.bytes))
        })?;
        Some(Self { text, tensors })
    }

    fn verify(
        &self,
        engine: &Arc<Engine>,
        reader: &Reader,
        progress: &dyn Fn(u64),
        should_stop: &dyn Fn() -> bool,
    ) -> std::result::Result<(), RowsError> {
        let file = VersionedFile::of_open(Arc::clone(reader.file()))?;
        let table = PackedDescription::parse(self.text, self.tensors)?.open(&file, engine)?;
        let block_bytes = table.blocks().map_or(0, |blocks| blocks.block_bytes as u64);
        let lists = [self.tensors.hot, self.tensors.checksums].into_iter().flatten().map(|(_, bytes)| bytes);
        let memory_bytes = MEMORY_BYTES.max(block_bytes.saturating_mul(BLOCKS_MIN));
        // A hot row takes up to nine bytes of memory, and four in the file.
        let memory_bytes = memory_bytes.saturating_add(lists.sum::<u64>().saturating_mul(3));
        RowStore::new(Arc::clone(engine), vec![file], table, None, memory_bytes)?
            .verify(progress, should_stop)
            .map(drop)
    }
}
