//! Loads in flight.

use std::sync::Arc;
use std::time::Duration;

use deepnvme_io::mem::{Region, RegionMut};
use deepnvme_io::{Comparisons, Engine, GpuAccess, ReadItem, Transfer};

use super::extent::{Extent, header_bytes_min, header_of, own_header_bytes};
use super::{FileMetadata, LoadBuffer, Reader, file_checksums, verify};
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::read::Verify;
use crate::sync::Instant;

/// Maximum size of a request, apart from headers. Smaller buffers share one, and the engine joins those that are
/// neighbours in the file. Finished requests are hashed while others are in flight.
pub const REQUEST_BYTES: u64 = if cfg!(simulated) { 16 << 10 } else { 32 << 20 };
/// How often a waiting thread polls for interruption.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A load in flight. Dropping it cancels unstarted requests and waits for the others: the memory belongs to the caller.
#[derive(Debug)]
pub struct Loading {
    reader: Arc<Reader>,
    access: GpuAccess,
    buffers: Vec<(LoadBuffer, Region)>,
    /// The headers that lie before their buffers: extent, and the header's first bytes.
    headers: Vec<(usize, Region)>,
    /// By buffer, then by start.
    parts: Vec<Part>,
    requests: Vec<ReadRequest>,
    began: Instant,
    comparisons: Comparisons,
}

/// A part of a buffer, and the request that reads it.
#[derive(Debug)]
struct Part {
    buffer: usize,
    start: u64,
    end: u64,
    request: usize,
}

/// One request for parts of buffers, and for headers.
#[derive(Debug)]
struct ReadRequest {
    bytes: u64,
    pending: Option<Transfer<Vec<RegionMut>>>,
}

/// The items of the next request.
#[derive(Default)]
struct Batch {
    items: Vec<ReadItem>,
    bytes: u64,
}

impl Loading {
    /// Begins a load that reads nothing yet.
    pub(super) fn new(reader: Arc<Reader>, engine: &Engine) -> Self {
        Self {
            reader,
            access: engine.gpu_access(),
            buffers: Vec::new(),
            headers: Vec::new(),
            parts: Vec::new(),
            requests: Vec::new(),
            began: Instant::now(),
            comparisons: engine.comparisons(),
        }
    }

    /// Starts to read more byte ranges of the file into memory. Each target is as long as its buffer.
    ///
    /// # Errors
    /// The error of a request that the engine rejects before it starts.
    ///
    /// # Panics
    /// If a target's length differs from its buffer's.
    pub fn add(&mut self, engine: &Engine, mut targets: Vec<(LoadBuffer, RegionMut)>) -> Result<()> {
        targets.sort_by_key(|(buffer, _)| buffer.offset);
        let mut batch = Batch::default();
        for (buffer, target) in targets {
            assert_eq!(buffer.bytes, target.len() as u64, "a target has the length of its buffer");
            let (index, offset, bytes) = (self.buffers.len(), buffer.offset, buffer.bytes);
            let header = self.header_before(&buffer);
            self.buffers.push((buffer, target.region()));
            let mut rest = target;
            let mut start = 0;
            while start < bytes {
                let end = (start + REQUEST_BYTES).min(bytes);
                let (now, later) = rest.split_at((end - start) as usize);
                rest = later;
                if batch.bytes > 0 && batch.bytes + (end - start) > REQUEST_BYTES {
                    self.submit(engine, std::mem::take(&mut batch))?;
                }
                self.parts.push(Part { buffer: index, start, end, request: self.requests.len() });
                self.push(&mut batch, offset + start, now);
                start = end;
            }
            if let Some((extent, offset, bytes)) = header {
                let memory = RegionMut::from_vec(vec![0; bytes]);
                self.headers.push((extent, memory.region()));
                self.push(&mut batch, offset, memory);
            }
        }
        self.submit(engine, batch)
    }

    /// Returns the header that lies before a buffer and has not been read yet: its extent, offset and size.
    fn header_before(&self, buffer: &LoadBuffer) -> Option<(usize, u64, usize)> {
        let index = buffer.members.first()?.extent;
        let extent = &self.reader.extents()[index];
        if self.reader.has_exact_offsets() || extent.header_offset >= buffer.offset {
            return None;
        }
        let before = (extent.data_offset - extent.header_offset) as usize;
        let wanted =
            if self.reader.checksums.covers_headers() { own_header_bytes(extent) } else { header_bytes_min(extent) };
        Some((index, extent.header_offset, wanted.min(before)))
    }

    fn push(&self, batch: &mut Batch, offset: u64, target: RegionMut) {
        batch.bytes += target.len() as u64;
        batch.items.push(ReadItem { file: Arc::clone(self.reader.file()), offset, target });
    }

    fn submit(&mut self, engine: &Engine, batch: Batch) -> Result<()> {
        if !batch.items.is_empty() {
            let pending = Some(engine.read_batch(batch.items)?);
            self.requests.push(ReadRequest { bytes: batch.bytes, pending });
        }
        Ok(())
    }

    /// Returns whether all requests have completed, successfully or not.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.requests.iter().filter_map(|request| request.pending.as_ref()).all(Transfer::is_done)
    }

    /// Waits for the load and verifies it: the headers of all records, and as much of the data as `verify` says.
    ///
    /// # Errors
    /// `Io`, `Damaged` with the offset, `Format` for a damaged header or sidecar, `NoChecksums` for a full verify of a
    /// file without checksums, `HeaderLength` if headers must be read first, `Changed` if the file was written to since
    /// it was opened, or `Interrupted`.
    pub fn finish(self, verify: Verify, progress: &Progress) -> Result<()> {
        let reader = Arc::clone(&self.reader);
        let result = self.finish_reads(verify, progress);
        reader.after_read(result)
    }

    fn finish_reads(mut self, verify: Verify, progress: &Progress) -> Result<()> {
        progress.expect(self.requests.iter().map(|request| request.bytes).sum());
        if verify != Verify::Off {
            self.reader.check_metadata()?;
        }
        let plan = verify::VerifyPlan::new(&self.reader, &self.buffers, &self.access, verify, self.began)?;
        let this = &self;
        let verified = plan.run(&|buffer, start, end| this.wait_for(buffer, start, end, progress), progress);
        self.collect_results(progress)?;
        // Check headers first: data from a wrong offset fails its checksums as well.
        self.check_headers(verify)?;
        let compared = verified?;
        self.comparisons.add(compared.compared, compared.skipped);
        Ok(())
    }

    /// Waits for a range of a buffer.
    fn wait_for(&self, buffer: usize, start: u64, end: u64, progress: &Progress) -> Result<()> {
        let first = self.parts.partition_point(|part| (part.buffer, part.end) <= (buffer, start));
        let overlapping = self.parts[first..].iter().take_while(|part| part.buffer == buffer && part.start < end);
        for pending in overlapping.filter_map(|part| self.requests[part.request].pending.as_ref()) {
            while !pending.wait_timeout(POLL_INTERVAL) {
                progress.check()?;
                pending.check_process()?;
            }
            if let Some(Err(error)) = pending.result() {
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Collects all results, up to an interruption or a failure.
    fn collect_results(&mut self, progress: &Progress) -> Result<()> {
        for ReadRequest { pending, .. } in &mut self.requests {
            while let Some(running) = pending.as_ref()
                && !running.wait_timeout(POLL_INTERVAL)
            {
                progress.check()?;
                running.check_process()?;
            }
            if let Some(done) = pending.take() {
                progress.advance(done.wait().1?.bytes);
            }
        }
        Ok(())
    }

    /// Checks the header of each record. Compares all of it if the checksums cover it.
    fn check_headers(&self, verify: Verify) -> Result<()> {
        if !matches!(self.reader.file_metadata(), FileMetadata::Archive { .. }) {
            return Ok(());
        }
        let is_compared = verify != Verify::Off && self.reader.checksums.covers_headers();
        for (extent, memory) in &self.headers {
            let mut front = vec![0; memory.len()];
            memory.copy_to_slice(0, &mut front);
            self.check_header(&self.reader.extents()[*extent], &front, is_compared)?;
        }
        for (buffer, memory) in &self.buffers {
            // Copy all headers of a buffer at once: each copy from GPU memory waits.
            let mut members = Vec::with_capacity(buffer.members.len());
            let mut parts = Vec::with_capacity(buffer.members.len());
            for member in &buffer.members {
                let extent = &self.reader.extents()[member.extent];
                let Some(at) = extent.header_offset.checked_sub(buffer.offset) else { continue };
                let wanted = if is_compared { own_header_bytes(extent) } else { header_bytes_min(extent) };
                parts.push((at as usize, wanted.min((member.at - at) as usize)));
                members.push(extent);
            }
            let mut fronts = vec![0; parts.iter().map(|(_, len)| len).sum()];
            self.access.copy_parts(memory, &parts, &mut fronts)?;
            let mut rest = &fronts[..];
            for (extent, (_, len)) in members.into_iter().zip(parts) {
                let (front, behind) = rest.split_at(len);
                rest = behind;
                self.check_header(extent, front, is_compared)?;
            }
        }
        Ok(())
    }

    /// Checks a header by its first bytes.
    fn check_header(&self, extent: &Extent, front: &[u8], is_compared: bool) -> Result<()> {
        if is_compared {
            file_checksums::compare_header(self.reader.path(), extent, front)?;
        }
        let header = header_of(self.reader.path(), extent, front)?;
        if extent.header_offset + header.header_bytes != extent.data_offset {
            return Err(Error::HeaderLength { path: self.reader.path().to_path_buf(), name: extent.name.clone() });
        }
        Ok(())
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        // All are cancelled before the first wait: otherwise the engine would begin the others meanwhile.
        self.requests.iter().filter_map(|request| request.pending.as_ref()).for_each(|pending| {
            pending.cancel();
        });
        for pending in self.requests.iter_mut().filter_map(|request| request.pending.take()) {
            let _ = pending.wait();
        }
    }
}
