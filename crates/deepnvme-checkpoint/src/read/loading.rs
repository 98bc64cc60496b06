//! Loads in flight.

use std::sync::Arc;
use std::time::Duration;

use deepnvme_io::mem::{Region, RegionMut};
use deepnvme_io::{Comparisons, Engine, GpuAccess, Transfer};

use super::extent::{header_of, header_room, sealed_room};
use super::{Contents, LoadBuffer, Reader, file_checksums, verify};
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::read::Verify;
use crate::sync::Instant;

/// Maximum size of a request. Finished requests are hashed while others are in flight.
const REQUEST_BYTES: u64 = if cfg!(simulated) { 16 << 10 } else { 32 << 20 };
/// How often a waiting thread polls for interruption.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A load in flight. Dropping it cancels unstarted requests and waits for the others: the memory belongs to the caller.
#[derive(Debug)]
pub struct Loading {
    reader: Arc<Reader>,
    access: GpuAccess,
    buffers: Vec<(LoadBuffer, Region)>,
    requests: Vec<ReadRequest>,
    began: Instant,
    comparisons: Comparisons,
}

/// One request for a part of a buffer.
#[derive(Debug)]
struct ReadRequest {
    buffer: usize,
    start: u64,
    end: u64,
    pending: Option<Transfer<RegionMut>>,
}

impl Loading {
    pub(super) fn start(reader: Arc<Reader>, engine: &Engine, targets: Vec<(LoadBuffer, RegionMut)>) -> Result<Self> {
        let access = engine.gpu_access();
        let (buffers, requests) = (Vec::with_capacity(targets.len()), Vec::new());
        let (began, comparisons) = (Instant::now(), engine.comparisons());
        let mut loading = Self { reader, access, buffers, requests, began, comparisons };
        for (buffer, target) in targets {
            assert_eq!(buffer.bytes, target.len() as u64, "a target has the length of its buffer");
            let index = loading.buffers.len();
            let (offset, bytes) = (buffer.offset, buffer.bytes);
            loading.buffers.push((buffer, target.region()));
            let mut rest = target;
            let mut start = 0;
            while start < bytes {
                let end = (start + REQUEST_BYTES).min(bytes);
                let (now, later) = rest.split_at((end - start) as usize);
                rest = later;
                let pending = Some(engine.read(loading.reader.file(), offset + start, now)?);
                loading.requests.push(ReadRequest { buffer: index, start, end, pending });
                start = end;
            }
        }
        Ok(loading)
    }

    /// Returns whether all requests have completed, successfully or not.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.requests.iter().filter_map(|request| request.pending.as_ref()).all(Transfer::is_done)
    }

    /// Waits for the load and verifies it: the headers of all records, and as much of the data as `verify` says.
    ///
    /// # Errors
    /// `Io`, `Damaged` with the offset, `Moved` if headers must be read first, or `Interrupted`.
    pub fn finish(mut self, verify: Verify, progress: &Progress) -> Result<()> {
        progress.expect(self.requests.iter().map(|request| request.end - request.start).sum());
        if verify != Verify::Off {
            self.reader.check()?;
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
        let first = self.requests.partition_point(|request| (request.buffer, request.end) <= (buffer, start));
        let overlapping =
            self.requests[first..].iter().take_while(|request| request.buffer == buffer && request.start < end);
        for pending in overlapping.filter_map(|request| request.pending.as_ref()) {
            while !pending.wait_timeout(POLL_INTERVAL) {
                progress.check()?;
            }
            if let Some(Err(error)) = pending.result() {
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Collects all results. An interruption cancels unstarted requests.
    fn collect_results(&mut self, progress: &Progress) -> Result<()> {
        let mut outcome = Ok(());
        for request in &mut self.requests {
            let Some(pending) = request.pending.take() else { continue };
            while outcome.is_ok() && !pending.wait_timeout(POLL_INTERVAL) {
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

    /// Checks the header that precedes each record in the buffer. Compares all of it if the checksums cover it.
    fn check_headers(&self, verify: Verify) -> Result<()> {
        if !matches!(self.reader.contents(), Contents::Archive { .. }) {
            return Ok(());
        }
        let is_compared = verify != Verify::Off && self.reader.checksums.covers_headers();
        for (buffer, memory) in &self.buffers {
            // Copy all headers of a buffer at once: each copy from GPU memory waits.
            let mut members = Vec::with_capacity(buffer.members.len());
            let mut parts = Vec::with_capacity(buffer.members.len());
            for member in &buffer.members {
                let extent = &self.reader.extents()[member.extent];
                let Some(at) = extent.header_offset.checked_sub(buffer.offset) else { continue };
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
                    file_checksums::compare_header(self.reader.path(), extent, front)?;
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
        self.requests.iter().filter_map(|request| request.pending.as_ref()).for_each(|pending| {
            pending.cancel();
        });
        for request in &mut self.requests {
            if let Some(pending) = request.pending.take() {
                let _ = pending.wait();
            }
        }
    }
}
