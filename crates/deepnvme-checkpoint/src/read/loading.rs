//! Loads in flight.

use std::sync::Arc;
use std::time::Duration;

use deepnvme_io::mem::{Region, RegionMut};
use deepnvme_io::{Comparisons, Engine, GpuAccess, Transfer};

use super::extent::{header_of, header_room, sealed_room};
use super::{Arena, Contents, Reader, seal, verify};
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::read::Verify;
use crate::sync::Instant;

/// Maximum size of a request. Finished requests are hashed while others are in flight.
const CHUNK_BYTES: u64 = if cfg!(simulated) { 16 << 10 } else { 32 << 20 };
/// How often a waiting thread polls for interruption.
const LOOK: Duration = Duration::from_millis(20);

/// A load in flight. Dropping it cancels unstarted requests and waits for the others: the memory belongs to the caller.
#[derive(Debug)]
pub struct Loading {
    reader: Arc<Reader>,
    access: GpuAccess,
    arenas: Vec<(Arena, Region)>,
    chunks: Vec<Chunk>,
    began: Instant,
    comparisons: Comparisons,
}

/// One request for a part of an arena.
#[derive(Debug)]
struct Chunk {
    arena: usize,
    start: u64,
    end: u64,
    pending: Option<Transfer<RegionMut>>,
}

impl Loading {
    pub(super) fn start(reader: Arc<Reader>, engine: &Engine, targets: Vec<(Arena, RegionMut)>) -> Result<Self> {
        let access = engine.gpu_access();
        let (arenas, chunks) = (Vec::with_capacity(targets.len()), Vec::new());
        let (began, comparisons) = (Instant::now(), engine.comparisons());
        let mut loading = Self { reader, access, arenas, chunks, began, comparisons };
        for (arena, target) in targets {
            assert_eq!(arena.bytes, target.len() as u64, "a target has the length of its arena");
            let index = loading.arenas.len();
            let (offset, bytes) = (arena.offset, arena.bytes);
            loading.arenas.push((arena, target.region()));
            let mut rest = target;
            let mut start = 0;
            while start < bytes {
                let end = (start + CHUNK_BYTES).min(bytes);
                let (now, later) = rest.split_at((end - start) as usize);
                rest = later;
                let pending = Some(engine.read(loading.reader.file(), offset + start, now)?);
                loading.chunks.push(Chunk { arena: index, start, end, pending });
                start = end;
            }
        }
        Ok(loading)
    }

    /// Returns whether all requests have completed, successfully or not.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.chunks.iter().filter_map(|chunk| chunk.pending.as_ref()).all(Transfer::is_done)
    }

    /// Waits for the load and verifies it: the headers of all records, and as much of the data as `verify` says.
    ///
    /// # Errors
    /// `Io`, `Damaged` with the offset, `Moved` if headers must be read first, or `Interrupted`.
    pub fn finish(mut self, verify: Verify, progress: &Progress) -> Result<()> {
        progress.expect(self.chunks.iter().map(|chunk| chunk.end - chunk.start).sum());
        if verify != Verify::Off {
            self.reader.check()?;
        }
        let plan = verify::Plan::new(&self.reader, &self.arenas, &self.access, verify, self.began)?;
        let this = &self;
        let verified = plan.run(&|arena, start, end| this.wait_for(arena, start, end, progress), progress);
        self.land(progress)?;
        // Check headers first: data from a wrong offset fails its checksums as well.
        self.check_headers(verify)?;
        let compared = verified?;
        self.comparisons.add(compared.compared, compared.skipped);
        Ok(())
    }

    /// Waits for a range of an arena.
    fn wait_for(&self, arena: usize, start: u64, end: u64, progress: &Progress) -> Result<()> {
        let first = self.chunks.partition_point(|chunk| (chunk.arena, chunk.end) <= (arena, start));
        let overlapping = self.chunks[first..].iter().take_while(|chunk| chunk.arena == arena && chunk.start < end);
        for pending in overlapping.filter_map(|chunk| chunk.pending.as_ref()) {
            while !pending.wait_timeout(LOOK) {
                progress.check()?;
            }
            if let Some(Err(error)) = pending.result() {
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Collects all results. An interruption cancels unstarted requests.
    fn land(&mut self, progress: &Progress) -> Result<()> {
        let mut outcome = Ok(());
        for chunk in &mut self.chunks {
            let Some(pending) = chunk.pending.take() else { continue };
            while outcome.is_ok() && !pending.wait_timeout(LOOK) {
                outcome = progress.check();
            }
            if outcome.is_err() {
                pending.cancel();
            }
            let (_, read) = pending.wait();
            match read {
                Ok(transfer) => progress.advance(transfer.bytes),
                Err(error) if outcome.is_ok() => outcome = Err(Error::from(error)),
                Err(_) => {}
            }
        }
        outcome
    }

    /// Checks the header that precedes each record in the arena. Compares all of it if the seal covers it.
    fn check_headers(&self, verify: Verify) -> Result<()> {
        if !matches!(self.reader.contents(), Contents::Archive { .. }) {
            return Ok(());
        }
        let is_compared = verify != Verify::Off && self.reader.seal.covers_headers();
        for (arena, memory) in &self.arenas {
            // Copy all headers of an arena at once: each copy from GPU memory waits.
            let mut members = Vec::with_capacity(arena.members.len());
            let mut parts = Vec::with_capacity(arena.members.len());
            for member in &arena.members {
                let extent = &self.reader.extents()[member.extent];
                let Some(at) = extent.header_offset.checked_sub(arena.offset) else { continue };
                let room = (member.at - at) as usize;
                let wanted = if is_compared { sealed_room(extent) } else { header_room(extent) };
                parts.push((at as usize, wanted.min(room)));
                members.push(extent);
            }
            let mut fronts = vec![0; parts.iter().map(|(_, len)| len).sum()];
            self.access.copy_parts(memory, &parts, &mut fronts)?;
            let mut rest = &fronts[..];
            for (extent, (_, len)) in members.into_iter().zip(parts) {
                let (front, behind) = rest.split_at(len);
                rest = behind;
                if is_compared {
                    seal::compare_header(self.reader.path(), extent, front)?;
                }
                let header = header_of(self.reader.path(), extent, front)?;
                if extent.header_offset + header.header_bytes != extent.data_offset {
                    return Err(Error::Moved { path: self.reader.path().to_path_buf(), name: extent.name.clone() });
                }
            }
        }
        Ok(())
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        self.chunks.iter().filter_map(|chunk| chunk.pending.as_ref()).for_each(|pending| {
            pending.cancel();
        });
        for chunk in &mut self.chunks {
            if let Some(pending) = chunk.pending.take() {
                let _ = pending.wait();
            }
        }
    }
}
