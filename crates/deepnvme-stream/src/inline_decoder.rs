//! Decoding on the waiting thread. Each range of a file is read once, even if several conversions need it.

use std::sync::Arc;
use std::time::Duration;

use deepnvme_file::VersionedFile;
use deepnvme_file::aligned_range::join_buffer;
use deepnvme_io::mem::{Buffer, PAGE_BYTES, RegionMut, ReservedRange};
use deepnvme_io::{Engine, Error as IoError, ReadItem, Transfer};

use crate::decode::{Workspace, convert};
use crate::error::{Error, Result};
use crate::layer_group::Conversion;
use crate::sync::Instant;

/// Bytes read ahead while the previous batch is decoded.
const BATCH_BYTES: usize = 16 << 20;

/// Memory that the next call reuses.
#[derive(Debug, Default)]
pub(crate) struct InlineDecoder {
    workspace: Workspace,
}

/// The cost of a call.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DecodeCost {
    pub(crate) bytes: u64,
    pub(crate) disk_busy: Duration,
    pub(crate) converting: Duration,
}

/// Reads in flight, with the conversions and the rest of the buffer for each.
struct Batch<'a> {
    pending: Transfer<Vec<RegionMut>>,
    reads: Vec<(&'a [Conversion], RegionMut)>,
    started: Instant,
}

impl InlineDecoder {
    /// Reads and decodes all conversions into `memory`; their `at` is an offset there.
    pub(crate) fn run(
        &mut self,
        engine: &Engine,
        sources: &[VersionedFile],
        mut conversions: Vec<Conversion>,
        memory: &ReservedRange,
    ) -> Result<DecodeCost> {
        let file_range = |each: &Conversion| (each.source, each.offset, each.bytes);
        conversions.sort_unstable_by_key(file_range);
        let reads: Vec<&[Conversion]> =
            conversions.chunk_by(|one, other| file_range(one) == file_range(other)).collect();
        let buffer_bytes = reads.iter().map(|read| read[0].bytes).max().unwrap_or(0) + PAGE_BYTES as usize;
        let (mut spare, mut cost) = (Vec::new(), DecodeCost::default());
        let mut in_flight: Option<Batch<'_>> = None;
        let mut batches = reads.chunks((BATCH_BYTES / buffer_bytes).max(1));
        loop {
            let next =
                batches.next().map(|reads| start(engine, sources, reads, buffer_bytes, &mut spare)).transpose()?;
            let is_over = next.is_none();
            if let Some(batch) = std::mem::replace(&mut in_flight, next) {
                self.finish(batch, sources, memory, &mut spare, &mut cost)?;
            }
            if is_over {
                return Ok(cost);
            }
        }
    }

    fn finish(
        &mut self,
        batch: Batch<'_>,
        sources: &[VersionedFile],
        memory: &ReservedRange,
        spare: &mut Vec<Buffer>,
        cost: &mut DecodeCost,
    ) -> Result<()> {
        let (targets, transfer) = batch.pending.wait();
        let transfer = transfer?;
        cost.disk_busy += transfer.finished.saturating_duration_since(batch.started);
        let began = Instant::now();
        for (target, (conversions, rest)) in targets.into_iter().flatten().zip(batch.reads) {
            let lost = || Error::Plan("an error lost the memory of a read".into());
            let buffer = join_buffer(Some(target), rest).ok_or_else(lost)?;
            let source = &buffer.as_slice()[conversions[0].aligned_range().in_buffer()];
            cost.bytes += source.len() as u64;
            for conversion in conversions {
                let target = memory.region_mut(conversion.at..conversion.at + conversion.target_bytes);
                let put = |at: usize, step: &[u8]| {
                    target.copy_from_slice(at, step);
                    Ok::<(), deepnvme_codec::Error>(())
                };
                convert(conversion, source, &mut self.workspace, put).map_err(|source| Error::Corrupt {
                    path: sources[conversion.source].file().path().to_path_buf(),
                    offset: conversion.offset,
                    source,
                })?;
            }
            spare.push(buffer);
        }
        cost.converting += began.elapsed();
        Ok(())
    }
}

fn start<'a>(
    engine: &Engine,
    sources: &[VersionedFile],
    reads: &[&'a [Conversion]],
    buffer_bytes: usize,
    spare: &mut Vec<Buffer>,
) -> Result<Batch<'a>> {
    let (mut items, mut kept) = (Vec::with_capacity(reads.len()), Vec::with_capacity(reads.len()));
    for conversions in reads {
        let (source, range) = (conversions[0].source, conversions[0].aligned_range());
        let buffer = spare.pop().map_or_else(|| Buffer::zeroed(buffer_bytes), Ok);
        let buffer = buffer.map_err(|error| IoError::from_io("allocate", &error))?;
        let (target, rest) = range.split(buffer);
        let file = Arc::clone(sources[source].file());
        items.push(ReadItem { file, offset: range.page_start(), target });
        kept.push((*conversions, rest));
    }
    let started = Instant::now();
    Ok(Batch { pending: engine.read_batch(items)?, reads: kept, started })
}
